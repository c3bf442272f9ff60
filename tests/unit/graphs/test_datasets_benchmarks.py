"""The public benchmarks, read from small files in the form of their sources, and what a failed download leaves."""

from __future__ import annotations

import gzip
import pickle
from urllib.error import URLError

import pytest
import torch

import graph_data_kit  # imports torch_geometric, whose warnings it lets through
from treadle.errors import ConfigError
from treadle.graphs import get_model
from treadle.graphs.datasets import benchmarks, get_dataset, ogb
from treadle.graphs.datasets.columns import ATOM_CODES, BOND_CODES, one_hot_columns

SIZES = {"train": 4, "val": 2, "test": 3}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Every download fails, after it has made a folder and a file, as torch_geometric's do."""

    def fail(self):
        from pathlib import Path

        Path(self.raw_dir).mkdir(parents=True, exist_ok=True)
        (Path(self.raw_dir) / "half.zip").write_bytes(b"half")
        raise URLError("no network")

    for kind in (benchmarks.ZINC, benchmarks.QM9, benchmarks.LRGBDataset, benchmarks.GNNBenchmarkDataset):
        monkeypatch.setattr(kind, "download", fail)

    def fail_url(url, folder, log=True):
        raise URLError("no network")

    monkeypatch.setattr(ogb, "download_url", fail_url)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def chain(length, first_bond=1):
    bonds = torch.zeros(length, length, dtype=torch.int64)
    for i in range(length - 1):
        bonds[i, i + 1] = bonds[i + 1, i] = first_bond if i == 0 else 1
    return bonds


def write_zinc(raw, splits=SIZES):
    for number, (split, size) in enumerate(splits.items()):
        molecules = [
            {
                "atom_type": torch.arange(3 + i) + number,
                "bond_type": chain(3 + i, first_bond=3),
                "logP_SA_cycle_normalized": torch.tensor([10.0 * number + i]),
            }
            for i in range(size + 1)
        ]
        write(raw / f"{split}.pickle", pickle.dumps(molecules))
        write(raw / f"{split}.index", (",".join(str(i + 1) for i in range(size)) + "\n").encode())


def test_zinc_keeps_its_own_splits_and_its_types(tmp_path):
    write_zinc(tmp_path / "ZINC" / "raw")
    data = get_dataset("zinc", tmp_path, "default")
    assert [[graph.y.item() for graph in split] for split in data.get_splits()] == [
        [1.0, 2.0, 3.0, 4.0], [11.0, 12.0], [21.0, 22.0, 23.0],
    ]  # fmt: skip
    graph = data.train[0]
    assert (data.num_features, data.num_edge_features, data.num_classes) == (28, 4, 1)
    assert graph.x.tolist() == [[0], [1], [2], [3]]
    assert graph.edge_attr.tolist() == [3, 3, 1, 1, 1, 1]
    assert graph.y.shape == (1, 1)
    model = get_model(
        num_features=data.num_features, num_edge_features=data.num_edge_features, num_classes=data.num_classes,
        node_pe_dim=data.node_pe_dim, relative_pe_dim=data.relative_pe_dim, hidden_dim=8, num_layers=1, num_heads=2,
    )  # fmt: skip
    (batch,) = graph_data_kit.DataLoader(data.val, batch_size=2)
    assert model(batch).shape == (2, 1)


def test_zinc_is_read_from_processed_files_alone(tmp_path):
    write_zinc(tmp_path / "ZINC" / "raw")
    first = get_dataset("zinc", tmp_path)
    for file in (tmp_path / "ZINC" / "raw").iterdir():
        file.unlink()
    second = get_dataset("zinc", tmp_path)
    assert [graph.y.item() for graph in second.test] == [graph.y.item() for graph in first.test]


def test_random_splits_leave_the_test_set_of_the_source(tmp_path):
    write_zinc(tmp_path / "ZINC" / "raw")
    data = get_dataset("zinc", tmp_path, splits="random", seed=1)
    assert [graph.y.item() for graph in data.test] == [21.0, 22.0, 23.0]
    rest = [[graph.y.item() for graph in split] for split in (data.train, data.val)]
    assert [len(split) for split in rest] == [4, 2]
    assert sorted(rest[0] + rest[1]) == [1.0, 2.0, 3.0, 4.0, 11.0, 12.0]
    assert rest[0] != [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", ["zinc", "qm9", "peptides_func", "ogbg_molhiv"])
def test_a_failed_download_names_the_alternatives_and_leaves_nothing(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no network.*'nci'.*'zinc_clean_leads'") as caught:
        get_dataset(name, tmp_path)
    assert isinstance(caught.value.__cause__, URLError)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_folder_is_named_and_left_as_it_is(tmp_path):
    write_zinc(tmp_path / "ZINC" / "raw")
    (tmp_path / "ZINC" / "raw" / "val.index").unlink()
    before = sorted(path.name for path in (tmp_path / "ZINC" / "raw").iterdir())
    with pytest.raises(FileNotFoundError, match=r"incomplete, it lacks raw/val\.index"):
        get_dataset("zinc", tmp_path)
    assert sorted(path.name for path in (tmp_path / "ZINC" / "raw").iterdir()) == before


def test_a_download_is_moved_into_place_when_it_is_whole_and_never_repeated(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.setattr(benchmarks.ZINC, "download", lambda self: write_zinc(Path(self.raw_dir)))
    assert len(get_dataset("zinc", tmp_path).train) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["ZINC"]
    monkeypatch.setattr(benchmarks.ZINC, "download", None)
    assert len(get_dataset("zinc", tmp_path).train) == 4


def atoms(count, element):
    codes = torch.zeros(count, 9, dtype=torch.int64)
    codes[:, 0] = element
    return codes


EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
BONDS = torch.tensor([[3, 0, 1]] * 4)


@pytest.mark.parametrize(
    ("name", "task_type", "width"), [("peptides_func", "multilabel", 10), ("peptides_struct", "regression", 11)]
)
def test_peptides_keep_their_splits_and_codes_become_columns(name, task_type, width, tmp_path):
    own_name = name.replace("_", "-")
    for number, (split, size) in enumerate(SIZES.items()):
        peptides = [(atoms(3, 6), BONDS, EDGES, torch.full((1, width), float(number))) for _ in range(size)]
        path = tmp_path / own_name / "raw" / f"{split}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(peptides, path)
    data = get_dataset("Peptides-" + name.removeprefix("peptides_"), tmp_path)
    assert (data.level, data.task_type, data.num_classes) == ("graph", task_type, width)
    assert [len(split) for split in data.get_splits()] == list(SIZES.values())
    assert [split[0].y[0, 0].item() for split in data.get_splits()] == [0.0, 1.0, 2.0]
    graph = data.train[0]
    assert graph.y.shape == (1, width)
    assert torch.equal(graph.x, one_hot_columns(atoms(3, 6), ATOM_CODES))
    assert torch.equal(graph.edge_attr, one_hot_columns(BONDS, BOND_CODES))
    assert (graph.x.shape[1], graph.edge_attr.shape[1]) == (data.num_features, data.num_edge_features)


def test_superpixels_have_a_class_per_node(tmp_path):
    for split, size in SIZES.items():
        images = [(torch.rand(3, 14), torch.rand(4, 2), EDGES, [20, 0, 5]) for _ in range(size)]
        write(tmp_path / "pascalvoc-sp" / "raw" / f"{split}.pickle", pickle.dumps(images))
    data = get_dataset("PascalVOC-SP", tmp_path)
    assert (data.level, data.task_type, data.num_classes) == ("node", "classification", 21)
    assert data.val[1].y.tolist() == [20, 0, 5]
    assert data.val[1].x.shape == (3, data.num_features)


def test_contacts_are_pairs_with_a_target_each(tmp_path):
    for split, size in SIZES.items():
        pairs, labels = torch.tensor([[0, 0], [1, 2]]), torch.tensor([0, 1])
        path = tmp_path / "pcqm-contact" / "raw" / f"{split}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([(atoms(3, 5), BONDS, EDGES, pairs, labels) for _ in range(size)], path)
    data = get_dataset("pcqm_contact", tmp_path)
    assert (data.level, data.task_type, data.num_classes) == ("edge", "edge_prediction", 1)
    (batch,) = graph_data_kit.DataLoader(data.val, batch_size=2)
    assert batch.pair_index.tolist() == [[0, 0, 3, 3], [1, 2, 4, 5]]
    assert batch.y.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_codes_outside_their_range_are_an_error(tmp_path):
    for split, size in SIZES.items():
        path = tmp_path / "peptides-func" / "raw" / f"{split}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([(atoms(3, 119), BONDS, EDGES, torch.zeros(1, 10)) for _ in range(size)], path)
    with pytest.raises(ConfigError, match="x: property 0 has codes from 119 to 119"):
        get_dataset("peptides_func", tmp_path)


def write_qm9(raw, count):
    from rdkit import Chem
    from rdkit.Chem import AllChem

    blocks = []
    for i in range(count):
        molecule = Chem.AddHs(Chem.MolFromSmiles("C" * (1 + i % 3) + "O"))
        AllChem.Compute2DCoords(molecule)
        molecule.SetProp("_Name", f"gdb {i + 1}")
        blocks.append(Chem.MolToMolBlock(molecule) + "$$$$\n")
    write(raw / "gdb9.sdf", "".join(blocks).encode())
    header = ",".join(["mol_id", *(f"property{k}" for k in range(19))])
    rows = [",".join([f"gdb_{i + 1}", *(str(float(100 * k + i)) for k in range(19))]) for i in range(count)]
    write(raw / "gdb9.sdf.csv", "\n".join([header, *rows, ""]).encode())
    write(raw / "uncharacterized.txt", "\n".join([*["header"] * 9, "2 gdb_2", "", ""]).encode())


def test_qm9_gives_one_target_and_a_fixed_split(tmp_path):
    write_qm9(tmp_path / "QM9" / "raw", 21)
    data = get_dataset("qm9", tmp_path, target=16)
    assert [len(split) for split in data.get_splits()] == [16, 2, 2]
    # Its reader puts the first three columns, the rotational constants, last; they are not converted.
    targets = [graph.y.item() for split in data.get_splits() for graph in split]
    assert sorted(targets) == [float(i) for i in range(21) if i != 1], "the second is marked as uncharacterised"
    assert targets[:16] != sorted(targets[:16])
    graph = data.train[0]
    assert graph.x.shape == (graph.num_nodes, data.num_features)
    assert graph.edge_attr.shape == (graph.num_edges, data.num_edge_features)
    with pytest.raises(ConfigError, match="target=19"):
        get_dataset("qm9", tmp_path, target=19)


def write_ogb(folder, labels):
    count = len(labels)
    tables = {
        "raw/num-node-list": ["3"] * count,
        "raw/num-edge-list": ["2"] * count,
        "raw/edge": ["0,1", "1,2"] * count,
        "raw/node-feat": [",".join(["6", *["0"] * 8])] * 3 * count,
        "raw/edge-feat": ["3,0,1", "0,0,0"] * count,
        "raw/graph-label": labels,
        "split/scaffold/train": [str(i) for i in range(2, count)],
        "split/scaffold/valid": ["1"],
        "split/scaffold/test": ["0"],
    }
    for name, lines in tables.items():
        write(folder / f"{name}.csv.gz", gzip.compress(("\n".join(lines) + "\n").encode()))


def test_ogb_keeps_its_scaffold_split_and_an_unknown_label_is_nan(tmp_path):
    write_ogb(tmp_path / "ogbg_moltox21", [f"{i % 2},," + ",".join(["1"] * 10) for i in range(6)])
    data = get_dataset("ogbg-moltox21", tmp_path)
    assert [len(split) for split in data.get_splits()] == [4, 1, 1]
    assert (data.task_type, data.num_classes) == ("multilabel", 12)
    assert data.val[0].y[0, 0] == 1.0
    assert data.test[0].y[0, 0] == 0.0
    graph = data.train[0]
    assert graph.y.shape == (1, 12)
    assert graph.y.isnan().tolist() == [[False, True, *[False] * 10]]
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    both_ways = torch.tensor([[3, 0, 1], [3, 0, 1], [0, 0, 0], [0, 0, 0]])
    assert torch.equal(graph.edge_attr, one_hot_columns(both_ways, BOND_CODES))
    assert graph.x.shape == (3, data.num_features)


def test_ogb_regression_has_its_one_target(tmp_path):
    write_ogb(tmp_path / "ogbg_molesol", [f"{i}.5" for i in range(5)])
    data = get_dataset("ogbg_molesol", tmp_path)
    assert (data.task_type, data.num_classes) == ("regression", 1)
    assert [graph.y.item() for graph in data.train] == [2.5, 3.5, 4.5]


def test_an_archive_of_ogb_is_unpacked_into_place(tmp_path, monkeypatch):
    import shutil
    from pathlib import Path

    def download(url, folder, log=True):
        assert url.endswith("/lipophilicity.zip")
        write_ogb(tmp_path / "made" / "lipophilicity", ["1", "2", "3"])
        return shutil.make_archive(str(Path(folder) / "lipophilicity"), "zip", tmp_path / "made")

    monkeypatch.setattr(ogb, "download_url", download)
    data = get_dataset("ogbg_mollipo", tmp_path / "data")
    assert [len(split) for split in data.get_splits()] == [1, 1, 1]
    assert sorted(path.name for path in (tmp_path / "data" / "ogbg_mollipo").iterdir()) == ["raw", "split"]


def test_tables_of_ogb_that_do_not_fit_each_other_are_an_error(tmp_path):
    write_ogb(tmp_path / "ogbg_molesol", ["1", "2", "3"])
    short = gzip.compress(b"0,1\n")
    (tmp_path / "ogbg_molesol" / "raw" / "edge.csv.gz").write_bytes(short)
    with pytest.raises(ConfigError, match=r"edge\.csv\.gz has 1 lines.*6"):
        get_dataset("ogbg_molesol", tmp_path)


def test_cifar10_is_read_from_its_one_file_with_colours_places_and_a_class_per_picture(tmp_path):
    path = tmp_path / "CIFAR10-SP" / "CIFAR10" / "raw" / "CIFAR10_v2.pt"
    path.parent.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    pictures = [
        [
            {
                "x": torch.rand(3, 3, generator=generator), "pos": torch.rand(3, 2, generator=generator),
                "edge_index": EDGES, "edge_attr": torch.rand(4, generator=generator), "y": torch.tensor([number]),
            }
            for number in range(size)
        ]
        for size in SIZES.values()
    ]  # fmt: skip
    torch.save(pictures, path)
    data = get_dataset("CIFAR10-SP", tmp_path)
    assert (data.level, data.task_type, data.num_classes) == ("graph", "classification", 10)
    assert [len(split) for split in data.get_splits()] == list(SIZES.values())
    graph, first = data.train[0], pictures[0][0]
    assert torch.equal(graph.x, torch.cat([first["x"], first["pos"]], dim=1))
    assert (graph.x.shape[1], graph.edge_attr.shape) == (data.num_features, (4, data.num_edge_features))
    assert [graph.y.tolist() for graph in data.val] == [[number] for number in range(SIZES["val"])]
