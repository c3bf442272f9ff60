from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from hook_kit import bare_engine, picture
from treadle.errors import ConfigError
from treadle.hooks import ImageFileLoggerHook
from treadle.hooks.values import as_image


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))


def test_nested_keys_become_folders_below_the_step(tmp_path):
    ImageFileLoggerHook().on_log_images(bare_engine(tmp_path, step=7), {"a": {"b": {"c": picture()}}, "d": picture()})
    assert files(tmp_path) == ["images/7/a/b/c.png", "images/7/d.png"]


def test_other_characters_become_underscores_and_no_key_leaves_the_folder(tmp_path):
    keys = {"a b/ü": picture(), "..": {"..": {"evil": picture()}}, "A-1_2.x": picture(), "": picture()}
    ImageFileLoggerHook(path="deep/images").on_log_images(bare_engine(tmp_path), keys)
    assert files(tmp_path / "deep" / "images" / "0") == ["A-1_2.x.png", "_.png", "__/__/evil.png", "a_b__.png"]


def test_keys_that_become_the_same_name_do_not_replace_each_other(tmp_path):
    ImageFileLoggerHook().on_log_images(bare_engine(tmp_path), {"a b": picture(1), "a_b": picture(2)})
    assert files(tmp_path) == ["images/0/a_b.png", "images/0/a_b_2.png"]


@pytest.mark.parametrize(("limit", "count"), [(None, 5), (2, 2), (0, 0), (9, 5)])
def test_max_images_counts_per_call(tmp_path, limit, count):
    hook, engine = ImageFileLoggerHook(max_images=limit), bare_engine(tmp_path, step=1)
    for engine.progress.step in (1, 2):
        hook.on_log_images(engine, {"a": {str(i): picture() for i in range(5)}})
    assert len(files(tmp_path)) == 2 * count


def test_only_steps_of_the_interval_are_written(tmp_path):
    hook, engine = ImageFileLoggerHook(interval=3), bare_engine(tmp_path)
    for engine.progress.step in range(1, 8):
        hook.on_log_images(engine, {"a": picture()})
    assert files(tmp_path) == ["images/3/a.png", "images/6/a.png"]


def test_arrays_and_tensors_are_images_too(tmp_path):
    import PIL.Image

    array = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    values = {
        "pil": PIL.Image.fromarray(array),
        "array": array,
        "tensor": torch.from_numpy(array).permute(2, 0, 1),
        "floats": torch.from_numpy(array).permute(2, 0, 1) / 255,
    }
    ImageFileLoggerHook().on_log_images(bare_engine(tmp_path), values)
    for path in files(tmp_path):
        assert np.array_equal(np.array(PIL.Image.open(tmp_path / path)), array), path
    grey = as_image(torch.rand(1, 5, 6, requires_grad=True))
    assert (grey.size, grey.mode) == ((6, 5), "L")
    assert as_image(torch.rand(5, 6).bfloat16()).size == (6, 5)


@pytest.mark.parametrize("value", [torch.zeros(2, 3, 4, 4), np.zeros((4, 4, 3)), np.zeros((4, 4, 7), np.uint8), 3, "x"])
def test_what_is_no_image_is_said_once_and_the_others_are_written(tmp_path, caplog, value):
    hook, engine = ImageFileLoggerHook(), bare_engine(tmp_path)
    for _ in range(2):
        hook.on_log_images(engine, {"bad": value, "good": picture()})
    assert files(tmp_path) == ["images/0/good.png"]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'bad'" in warnings[0]


def test_a_dry_run_writes_nothing(tmp_path):
    ImageFileLoggerHook().on_log_images(bare_engine(tmp_path), {"a": picture()}, dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_only_rank_0_writes(tmp_path, other_rank):
    ImageFileLoggerHook().on_log_images(bare_engine(tmp_path), {"a": picture()})
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_without_a_workspace_names_the_fix():
    with pytest.raises(ConfigError, match="workspace="):
        ImageFileLoggerHook().on_before_train(bare_engine(None))


@pytest.mark.parametrize("arguments", [{"interval": 0}, {"max_images": -1}])
def test_values_outside_their_range_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ImageFileLoggerHook(**arguments)


def test_the_format_may_depend_on_the_key(tmp_path):
    import PIL.Image

    hook = ImageFileLoggerHook(image_format=lambda key: "jpg" if key[0] == "mesh" else "png")
    image = PIL.Image.new("RGBA", (1, 1))
    hook.on_log_images(bare_engine(tmp_path, step=7), {"mesh": {"a.b": image}, "depth": {"a.b": image}})
    with PIL.Image.open(tmp_path / "images/7/mesh/a.b.jpg") as mesh:
        assert mesh.format == "JPEG"
    with PIL.Image.open(tmp_path / "images/7/depth/a.b.png") as depth:
        assert depth.mode == "RGBA"


def test_a_format_that_pillow_does_not_write_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"image_format='pgn'.*png"):
        ImageFileLoggerHook(image_format="pgn").on_before_train(bare_engine(tmp_path))


def test_images_of_an_earlier_run_are_set_aside_whole(tmp_path):
    images = tmp_path / "images"
    (images / "4").mkdir(parents=True)
    (images / "4" / "first.png").write_bytes(b"first")
    (images / "mine.txt").write_text("x")
    hook = ImageFileLoggerHook(1)
    hook.on_before_train(bare_engine(tmp_path, step=0))
    assert (tmp_path / "images.1" / "4" / "first.png").read_bytes() == b"first"
    assert [path.name for path in images.iterdir()] == ["mine.txt"]
    (images / "4").mkdir()
    hook.on_before_train(bare_engine(tmp_path, step=4))  # a resumed run goes on in them
    assert sorted(path.name for path in images.iterdir()) == ["4", "mine.txt"]
