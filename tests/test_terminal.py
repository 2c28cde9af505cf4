"""Progress in a file or a pipe is a line every few seconds, and nothing for short work."""

from lln_fairseq import terminal


def test_short_work_prints_nothing(capsys):
    with terminal.progress_bar("transfer", 3) as bar:
        for _ in range(3):
            bar.update()
    assert capsys.readouterr().err == ""


def test_long_work_prints_a_line_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SHORTEST", 0)
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0)
    with terminal.progress_bar("evaluation", 4, "text", initial=2) as bar:
        bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert lines[0].startswith("evaluation:  50%")
    assert any("| 3/4 [" in line and "<" in line for line in lines)


def test_progress_of_a_training_shows_its_loss(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SHORTEST", 0)
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0)

    with terminal.progress_bar("pre-train", 100, "update") as bar:
        terminal.show_update(bar, 10, "9.1")
        terminal.show_update(bar, 20, "8.5")

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("pre-train:   0%|")
    assert any("| 20/100 [" in line and "loss 8.5 bits" in line for line in lines)
