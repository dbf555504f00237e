import sparsifiner.progress
from sparsifiner.progress import show_progress


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sparsifiner.progress.time, "monotonic", lambda: now[0])
    with show_progress() as display:
        advance = display.start("images", 100)
        unknown = display.start("shards", 0)
        for _ in range(10):
            now[0] += 10
            advance(10)
            unknown(1)
        display.begin("phase 2", 8, 5)
        now[0] += 1
        display.update(6, "loss 0.5")
        display.update(8, "loss 0.4")
        display.begin("phase 3", 9, 5)  # goes on: the five before were not of this run
        now[0] += 40
        display.update(6, "loss 0.3")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("images")] == [
        "images: 30/100, 30 s, 70 s left",
        "images: 60/100, 60 s, 40 s left",
        "images: 90/100, 90 s, 10 s left",
        "images: 100/100, 100 s",
    ]
    assert [line for line in lines if line.startswith("shards")] == [
        "shards: 3, 30 s",
        "shards: 6, 60 s",
        "shards: 9, 90 s",
    ]
    assert lines[-2:] == ["phase 2: 8/8, 1 s, loss 0.4", "phase 3: 6/9, 40 s, 120 s left, loss 0.3"]
    assert sum(line.startswith("phase") for line in lines) == 2


def test_bars_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with show_progress() as display:
        display.start("images", 4)(4)
        display.begin("phase 2", 8, 5)
        display.update(8, "loss 0.4")
    text = capsys.readouterr().err
    assert "4/4" in text
    assert "8/8" in text
    assert "loss 0.4" in text
