"""A run page in a real browser: it draws, answers the mouse, hides runs, keeps its view, and fits a phone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

import browser_kit
from command_kit import treadle
from processes import Forked
from run_page_kit import make_run, step_rows
from treadle.hooks.steplog import read_steps

pytestmark = [
    pytest.mark.skipif(bool(browser_kit.MISSING), reason=f"not installed: {', '.join(browser_kit.MISSING)}"),
    pytest.mark.xdist_group("browser"),
]
CHARTS = ["loss", "grad_norm", "lr", "speed"]
DRAWN = "return document.querySelectorAll('.plot .main-svg').length >= 4"
SHOWN = """
return [...new Set(document.getElementById('chart-loss').data.filter((t) => t.visible).map((t) => t.meta.run))]
"""
SHOWN_LINES = "return document.querySelectorAll('#chart-loss .scatterlayer .trace').length"
RANGE = "return document.getElementById(`chart-${arguments[0]}`).layout.xaxis.range"
ZOOM = "Plotly.relayout('chart-loss', {'xaxis.range[0]': 20, 'xaxis.range[1]': 50})"
GROUND = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("first", 0.1), ("second", 0.2)):
        make_run(folder / name, lr=lr)
    assert treadle("report", folder) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser_kit.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(tab, page):
    tab.prefers("light")
    tab.width(1200)
    tab.open(page)
    tab.run("sessionStorage.clear()")
    tab.open(page)
    tab.wait(DRAWN)
    return tab


def click(tab, selector):
    tab.run("document.querySelector(arguments[0]).click()", selector)


def set_smoothing(tab, value):
    script = "const s = document.getElementById('smooth'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
    tab.run(script, value)


def test_it_draws_every_chart_without_an_error_and_shows_values_under_the_mouse(opened):
    assert opened.run("return [...document.querySelectorAll('.plot')].map((one) => one.id)") == [
        f"chart-{key}" for key in CHARTS
    ]
    assert opened.run(SHOWN_LINES) > 2
    set_smoothing(opened, 0)
    place = opened.run("""
        const box = document.querySelector('#chart-loss .nsewdrag').getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
    """)
    for moved in (0, 1):
        opened.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] + moved, y=place[1])
    text = opened.wait("return document.querySelector('#chart-loss .hoverlayer').textContent")
    step = int(re.search(r"Step (\d+)", text)[1][:2])
    loss = step_rows(120)[step - 1]["loss"]
    assert f"first, training : {loss:.4g}" in text
    assert opened.errors() == []


def test_nothing_can_be_loaded_from_elsewhere(opened):
    refused = opened.run("""
        return new Promise((done) => {
          document.addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));
          fetch('http://127.0.0.1:9/').catch(() => {});
        });
    """)
    assert refused == "connect-src"
    assert len(opened.errors()) > 0  # which is also how the other tests would notice


def test_a_click_on_a_run_hides_its_curves_and_another_shows_them(opened):
    lines = opened.run(SHOWN_LINES)
    assert opened.run(SHOWN) == [0, 1]
    click(opened, "[data-run='0']")
    assert opened.run(SHOWN) == [1]
    assert 0 < opened.run(SHOWN_LINES) < lines
    assert opened.run("return document.querySelector(\"[data-run='0']\").getAttribute('aria-pressed')") == "false"
    click(opened, "[data-run='0']")
    assert opened.run(SHOWN) == [0, 1]


def test_zoom_is_shared_and_with_all_choices_kept_over_a_reload(opened, page):
    opened.run(ZOOM)
    opened.wait("return document.getElementById('chart-lr').layout.xaxis.range[0] === 20")
    assert [opened.run(RANGE, key) for key in CHARTS] == [[20, 50]] * 4
    click(opened, "[data-run='1']")
    click(opened, "#log")
    opened.open(page)
    opened.wait(DRAWN)
    assert [opened.run(RANGE, key) for key in CHARTS] == [[20, 50]] * 4
    assert opened.run(SHOWN) == [0]
    assert opened.run("return document.getElementById('chart-loss').layout.yaxis.type") == "log"
    click(opened, "#reset")
    assert opened.run(RANGE, "lr")[1] > 100
    click(opened, "[data-axis='time']")
    assert opened.run("return document.getElementById('chart-loss').layout.xaxis.title.text") == "Training time (s)"
    assert max(opened.run("return document.getElementById('chart-lr').data[0].x")) == 12.0
    assert opened.errors() == []


def test_a_page_whose_watch_was_killed_says_so_and_keeps_its_place(tab, page, tmp_path):
    head, _, rest = page.read_text(encoding="utf-8").partition("<script>")
    drawer = "<script>const Plotly = {react: (plot) => { plot.on = () => {}; }};</script>"  # loads in no time
    text = head + drawer + rest.partition("</script>")[2]
    assert '"reload":null' in text
    hidden = "return document.getElementById('old').hidden"
    for seconds, written, fresh in ((3600, time.time(), True), (1, 1, False)):
        old = re.sub('"reload":null,"written":[0-9.]+', f'"reload":{seconds},"written":{written}', text)
        (tmp_path / "page.html").write_text(old, encoding="utf-8")
        tab.open(tmp_path / "page.html")
        assert tab.run(hidden) is fresh
    loaded = tab.run("scrollTo(0, 500); return performance.timeOrigin")
    tab.wait("return performance.timeOrigin > arguments[0] && scrollY === 500", loaded)
    tab.open(page)


JOB = """
import pathlib, time
import torch
from treadle import BaseTrainer, StepLogHook

class Fit(BaseTrainer):
    def build_data_loader(self):
        return [torch.ones(2, 1)] * 10
    def build_model(self):
        return torch.nn.Linear(1, 1)
    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)
    def build_hooks(self):
        return [StepLogHook(interval=1)]
    def forward(self, input):
        while not pathlib.Path(f"{(self.step - 1) // 20}.go").exists():  # in steps of the test's
            time.sleep(0.05)
        return self.model(input).square().mean(), {}

Fit(60, workspace="run", device="cpu").train()
"""


def test_a_watched_page_draws_what_a_running_job_adds_until_it_ends(tab, tmp_path):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "0.go").touch()
    where = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watch = [sys.executable, "-m", "treadle", "report", "run", "--watch", "--interval", "2"]
    points = """
    const chart = document.getElementById('chart-loss');
    return Boolean(chart && chart.data) && chart.data[0].x.length >= arguments[0];
    """
    with Forked([sys.executable, "job.py"], **where) as job:
        try:
            until = time.monotonic() + 120
            while len(read_steps(tmp_path / "run" / "steps.jsonl")) < 20 and time.monotonic() < until:
                time.sleep(0.05)
            with Forked(watch, **where) as watching:
                try:
                    while not (tmp_path / "run" / "report.html").exists() and time.monotonic() < until:
                        time.sleep(0.05)
                    tab.open(tmp_path / "run" / "report.html")
                    tab.wait(points, 20)
                    tab.wait("return document.body.innerText.includes('running')")
                    (tmp_path / "1.go").touch()
                    tab.wait(points, 40)  # nobody reloads it
                    (tmp_path / "2.go").touch()
                    assert (job.wait(120), watching.wait(120)) == (0, 0)
                    tab.wait(points, 60)
                    tab.wait("return document.body.innerText.includes('finished')")
                finally:
                    watching.kill()
        finally:
            job.kill()
    assert tab.errors() == []


def test_smoothing_changes_the_strong_line_and_leaves_the_points(opened):
    spread = """
    const lines = document.getElementById('chart-grad_norm').data.filter((t) => t.meta.run === 0);
    return lines.map((line) => Math.max(...line.y) - Math.min(...line.y));
    """
    points, smooth = opened.run(spread)
    assert smooth < points
    set_smoothing(opened, 0)
    assert opened.run(spread) == [points]


def test_dark_follows_the_system_and_the_button(opened):
    light = opened.run(GROUND)
    opened.prefers("dark")
    dark = opened.wait(f"{GROUND} !== arguments[0] && getComputedStyle(document.body).backgroundColor", light)
    click(opened, "#theme")
    assert opened.run(GROUND) == light
    click(opened, "#theme")
    assert opened.run(GROUND) == dark
    colours = "return document.getElementById('chart-loss').layout.font.color"
    assert opened.run(colours) == opened.run(
        "return getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
    )


def test_it_fits_a_phone(opened, page):
    opened.width(360)
    opened.open(page)
    opened.wait(DRAWN)
    opened.run("for (const part of document.querySelectorAll('details')) part.open = true")
    assert opened.run("return document.documentElement.scrollWidth") <= 360
    widths = opened.run(
        "return [...document.querySelectorAll('.plot')].map((one) => one.getBoundingClientRect().right)"
    )
    assert max(widths) <= 360


@pytest.fixture(scope="module")
def sweep_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    for number in range(12):
        lr, seed = (0.01, 0.1)[number % 2], number // 2
        run = make_run(folder / f"run{number + 1}", lr=lr, best=lr + seed)
        (run / "config.json").write_text(json.dumps({"optimizer": {"lr": lr}, "seed": seed, "out": str(run)}))
    assert treadle("report", folder) == 0
    return folder / "report.html"


ROWS = """
return [...document.querySelectorAll('#runs tbody tr')].filter((r) => !r.hidden).map((r) => r.cells[0].textContent)
"""
ALONE = "return document.querySelectorAll('#runs tbody tr:not(.away)').length"
NAMES = (
    "return document.getElementById('chart-loss').data.filter((t) => t.meta.label === 'training').map((t) => t.name)"
)


def test_a_table_of_settings_and_results_sorts_filters_and_isolates(tab, sweep_page):
    tab.width(1280)
    tab.open(sweep_page)
    tab.wait(DRAWN)
    assert tab.run(ROWS)[:3] == ["run1", "run2", "run3"]
    assert tab.run(ROWS)[-1] == "run12"
    titles = tab.run("return [...document.querySelectorAll('#runs th')].map((h) => h.textContent)")
    assert titles[:5] == ["run", "status", "optimizer.lr", "seed", "best val_loss"]
    click(tab, '[data-sort="4"]')
    assert tab.run(ROWS)[:2] == ["run1", "run2"]
    click(tab, '[data-sort="4"]')
    assert tab.run(ROWS)[:2] == ["run12", "run11"]
    tab.run(
        "const f = document.getElementById('filter'); f.value = 'lr=0.1 seed<2'; f.dispatchEvent(new Event('input'))"
    )
    assert sorted(tab.run(ROWS)) == ["run2", "run4"]
    click(tab, "#all")
    click(tab, '[data-row="3"]')
    assert tab.run(ALONE) == 1
    click(tab, '[data-row="3"]')
    assert tab.run(ALONE) == 12
    assert tab.errors() == []


def test_seeds_of_one_setting_are_a_mean_and_a_band_until_they_are_unfolded(tab, sweep_page):
    tab.width(1280)
    tab.open(sweep_page)
    tab.run("sessionStorage.clear()")
    tab.open(sweep_page)
    tab.wait(DRAWN)
    assert tab.run(NAMES) == ["optimizer.lr=0.01 (6 seeds), training", "optimizer.lr=0.1 (6 seeds), training"]
    assert tab.run("return document.getElementById('chart-loss').data.filter((t) => t.fill === 'tonexty').length") == 4
    axes = tab.run("return document.getElementById('parallel').layout.annotations.map((one) => one.text)")
    assert {"optimizer.lr", "seed", "best val_loss"} <= set(axes)
    click(tab, "#fold")
    assert len(set(tab.run(NAMES))) == 12
    assert tab.errors() == []
