"""Progress in a file or a pipe is a line every few seconds, and nothing for short work."""

from lln_fairseq.linearize import progress_bar as progress


def test_short_work_prints_nothing(capsys):
    with progress.progress_bar("transfer", 3) as bar:
        for _ in range(3):
            bar.update()
    assert capsys.readouterr().err == ""


def test_long_work_prints_a_line_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHORTEST", 0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress.progress_bar("evaluation", 4, "text", initial=2) as bar:
        bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert lines[0].startswith("evaluation:  50%")
    assert any("| 3/4 [" in line and "<" in line for line in lines)
