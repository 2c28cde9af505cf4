from torch.utils.tensorboard import SummaryWriter

from lln_fairseq.analysis.events import Curve, read_curves


def test_files_of_an_interrupted_run_are_joined(tmp_path):
    for start, value in ((0, 1.0), (2, 5.0)):  # the second file repeats steps 2 and 3
        with SummaryWriter(tmp_path / "train_inner", filename_suffix=f".{start}") as writer:
            for step in range(start, start + 4):
                writer.add_scalar("loss", value + step, step)
    with SummaryWriter(tmp_path / "valid") as writer:
        writer.add_scalar("loss", 0.5, 3)

    assert read_curves(tmp_path) == {
        "train_inner/loss": Curve([0, 1, 2, 3, 4, 5], [1.0, 2.0, 7.0, 8.0, 9.0, 10.0]),
        "valid/loss": Curve([3], [0.5]),
    }


def test_files_of_the_same_second_are_ordered_by_their_counter(tmp_path):
    for counter, value in ((9, 1.0), (10, 2.0)):
        with SummaryWriter(tmp_path / str(counter)) as writer:
            writer.add_scalar("loss", value, 1)
        (file,) = (tmp_path / str(counter)).iterdir()
        file.rename(tmp_path / f"events.out.tfevents.1700000000.host.1.{counter}")

    assert read_curves(tmp_path) == {"./loss": Curve([1], [2.0])}
