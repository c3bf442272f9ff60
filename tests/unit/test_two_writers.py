"""Two threads of one process that write the same file, as two background writers of a run do."""

from __future__ import annotations

import threading

from treadle.checkpoint.files import link_in_folder, replacing, write_text


def test_a_file_that_another_thread_writes_is_waited_for_and_never_replaced_by_a_link(tmp_path):
    target, begun, go_on = tmp_path / "last.pt", threading.Event(), threading.Event()
    (tmp_path / "step.pt").write_text("step")

    def write_slowly():
        with replacing(target) as temporary:
            temporary.write_text("first")
            begun.set()
            assert go_on.wait(30)
            assert temporary.read_text() == "first"

    first = threading.Thread(target=write_slowly)
    first.start()
    assert begun.wait(30)
    link_in_folder(tmp_path / "step.pt", target)
    assert not target.exists()
    second = threading.Thread(target=lambda: write_text("second", target))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    go_on.set()
    first.join(30)
    second.join(30)
    assert target.read_text() == "second"
    assert not target.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "step.pt"]
