"""push_to_hub against a local server that speaks the Hub's protocol: what is uploaded, and the card."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle.exchange.export import export_weights
from treadle.runs.hub import model_card, stage_upload

pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
load = pytest.importorskip("safetensors.torch", reason="the extra hub is not installed").load


class Hub(BaseHTTPRequestHandler):
    """Answers the requests of create_repo and upload_folder, and keeps what was committed."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.heard.append((self.path, self.headers.get("Authorization")))
        if self.path.endswith("/repos/create"):
            self.server.created = json.loads(body)
            answer = {"url": f"{self.server.address}/me/digits", "name": "me/digits"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "header":
                    self.server.message = line["value"]["summary"]
            answer = {
                "commitUrl": f"{self.server.address}/me/digits/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
        else:
            answer = {}
        self.answer(answer)

    def do_GET(self):
        self.answer({"id": "me/digits", "siblings": [], "sha": "0"})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.address = f"http://127.0.0.1:{server.server_port}"
        server.heard, server.files, server.created, server.message = [], {}, None, None
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path):
    treadle.set_seed(0)
    x = torch.randn(12, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4)
    model = nn.Linear(3, 1)
    trainer = treadle.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss(),
        device="cpu",
        progress=False,
        max_grad_norm=2.0,
    )
    trainer.train(loader, 3, loader, save_dir=tmp_path / "digits")
    return tmp_path / "digits"


def test_a_run_is_uploaded_with_weights_records_and_a_card(server, run):
    address = treadle.push_to_hub(
        run, "me/digits", private=True, token="hf_test", endpoint=server.address, message="First"
    )
    assert address == f"{server.address}/me/digits"
    assert server.created["name"] == "digits"
    assert server.created.get("private") is True or server.created.get("visibility") == "private"
    assert {authorization for _, authorization in server.heard} == {"Bearer hf_test"}
    assert server.message == "First"
    assert set(server.files) == {"README.md", "history.json", "model.safetensors", "settings.json"}
    weights = load(server.files["model.safetensors"])
    best = treadle.load_weights(run / "best_model.pt")
    assert all(torch.equal(weights[name], value) for name, value in best.items())


def test_the_card_has_results_settings_and_how_to_load(run, tmp_path):
    (tmp_path / "stage").mkdir()
    stage_upload(run, tmp_path / "stage")
    text = (tmp_path / "stage" / "README.md").read_text()
    losses = json.loads((run / "history.json").read_text())["eval_loss"]
    assert text.startswith("---\nlibrary_name: treadle\n")
    assert f"| eval_loss | {min(losses):.4g} | {losses[-1]:.4g} |" in text
    assert "| trainer.max_grad_norm | `2.0` |" in text
    assert "load_file" in text
    assert "torch 2." in text
    assert "epoch 3" in text


def test_a_model_with_save_pretrained_is_uploaded_as_it_writes_itself(run, tmp_path):
    (run / "pretrained").mkdir()
    (run / "pretrained" / "config.json").write_text("{}")
    (run / "pretrained" / "weights.bin").write_bytes(b"1")
    (tmp_path / "stage").mkdir()
    stage_upload(run, tmp_path / "stage")
    names = {path.name for path in (tmp_path / "stage").iterdir()}
    assert {"config.json", "weights.bin", "README.md"} <= names
    assert "model.safetensors" not in names
    assert "from_pretrained" in (tmp_path / "stage" / "README.md").read_text()


def test_a_card_of_a_bare_checkpoint_leaves_out_what_is_not_known(run, tmp_path):
    source = export_weights(run / "best_model.pt", "torch", out=tmp_path / "weights.pt").source
    text = model_card(tmp_path / "nowhere", source, title="mine")
    assert "# mine" in text
    assert "## Results" not in text
    assert "## Settings" not in text


@pytest.mark.parametrize("name", ["digits", "me/", "a/b/c"])
def test_a_wrong_name_is_refused_before_anything_is_read(name):
    with pytest.raises(treadle.ConfigError, match="owner/name"):
        treadle.push_to_hub("nowhere", name)


def test_a_missing_run_is_named():
    with pytest.raises(treadle.ConfigError, match="no such file or folder"):
        treadle.push_to_hub("nowhere", "me/digits", token="hf_test", endpoint="http://127.0.0.1:1")
