"""Run an exported encoder and classifier in Ray Data, datasets and Spark, and compare with `encode` and `predict`.

    python -m tests.engines.check FOLDER ENGINE...

This needs the engines, and no fairseq. FOLDER has what `tests.engines.models` wrote, and encoder.npy and
classifier.tsv, the outputs of `encode` and `predict`. Each run has two workers, of which one is killed with SIGKILL.
The program prints a line for each comparison, and ends with exit code 1 at the first one that fails.
"""

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from lln_fairseq.engines import TextMapper
from tests.engines.rows import has_output, make_rows

TOLERANCE = 1e-5
KILLED_AT = 7_000  # the row at which a worker is killed
BATCH_ROWS = 512
FILES = 40
RAY_OUTPUT = "ray-output"


class MapperKilledOnce(TextMapper):
    """A mapper whose process is killed at row KILLED_AT, in the first process that gets there."""

    def __init__(self, directory: str, marker: str) -> None:
        super().__init__(directory)
        self.marker = marker

    def __call__(self, batch: Any) -> dict[str, Any]:
        if KILLED_AT in batch["id"] and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def run_ray(mapper: type, options: dict[str, Any], folder: Path, workers: int) -> list[dict[str, Any]]:
    import ray

    if not ray.is_initialized():  # with a core to read, and one to leave out what a checkpoint has: workers keep theirs
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 2**20  # a block is what a worker gets, by default of up to 128 MiB: all rows
    rows = ray.data.read_parquet(str(folder / "rows"))
    mapped = rows.map_batches(
        mapper, fn_constructor_kwargs=options, batch_size=BATCH_ROWS, compute=ray.data.ActorPoolStrategy(size=workers)
    )
    return mapped.drop_columns(["text"]).take_all()


def run_ray_resumed(options: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run a job that ends with an error, then the same job again, with a checkpoint of the rows that were written."""
    import ray
    from ray.data.checkpoint import CheckpointConfig

    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        "id", str(folder / "ray-checkpoint"), delete_checkpoint_on_success=False
    )
    written = str(folder / RAY_OUTPUT)

    def run(mapper: type, **extra: Any) -> None:
        rows = ray.data.read_parquet(str(folder / "rows"))
        mapped = rows.map_batches(
            mapper,
            fn_constructor_kwargs=options | extra,
            batch_size=BATCH_ROWS,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        mapped.drop_columns(["text"]).write_parquet(written)

    try:
        run(MapperWithError, marker=str(folder / "ray-error"))
    except Exception as error:
        print(f"    the job ended with {type(error).__name__}")
    done = pyarrow.parquet.read_table(written, columns=["id"]).num_rows
    run(MapperWithError, marker=str(folder / "ray-error"))
    context.checkpoint_config = None
    print(f"    {done} rows were written before, and not computed again")
    return pyarrow.parquet.read_table(written).to_pylist()


class MapperWithError(MapperKilledOnce):
    """A mapper that raises an exception instead of being killed, which ends a job."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        if KILLED_AT in batch["id"] and not os.path.exists(self.marker):
            deadline = time.monotonic() + 300
            while not list(Path(self.marker).with_name(RAY_OUTPUT).glob("*.parquet")) and time.monotonic() < deadline:
                time.sleep(0.1)  # until the other worker's batches are written
            Path(self.marker).touch()
            raise RuntimeError("the job ends here")
        return TextMapper.__call__(self, batch)


def run_datasets(mapper: type, options: dict[str, Any], folder: Path, workers: int) -> list[dict[str, Any]]:
    """Run a job in a process of its own, and if a killed worker ends it, the same job in a new process."""
    for _ in range(2):
        # After the loss of a worker, a second `map` in the same process waits for ever.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            try:
                return process.submit(map_datasets, mapper, options, folder, workers).result()
            except RuntimeError as error:
                print(f"    the job ended ({error!s:.80}...) and is started again", flush=True)
    return []


def map_datasets(mapper: type, options: dict[str, Any], folder: Path, workers: int) -> list[dict[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_files=str(folder / "rows" / "*.parquet"), split="train")
    mapped = rows.map(mapper(**options), batched=True, batch_size=BATCH_ROWS, num_proc=workers, remove_columns=["text"])
    return mapped.to_list()


def run_spark(mapper: type, options: dict[str, Any], folder: Path, workers: int) -> list[dict[str, Any]]:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import col
    from pyspark.sql.types import ArrayType, FloatType, StringType, StructField, StructType

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{workers},4]").config(
        "spark.ui.enabled", "false"
    )  # 4 tries of a task
    builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH_ROWS)
    session = builder.config("spark.driver.memory", "2g").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    columns = {"vector": ArrayType(FloatType())}
    if "classifier" in options["directory"]:
        columns = {"label": StringType(), "probability": FloatType()}
    columns["error"] = StringType()

    def make_predict_fn() -> Callable[..., dict[str, Any]]:
        map_texts = mapper(**options)

        def predict(number: np.ndarray, text: np.ndarray) -> dict[str, np.ndarray]:
            outputs = map_texts({"id": number, "text": text})
            return {name: outputs[name] for name in columns}

        return predict

    return_type = StructType([StructField(name, kind) for name, kind in columns.items()])
    outputs = predict_batch_udf(make_predict_fn, return_type=return_type, batch_size=BATCH_ROWS)
    rows = session.read.parquet(str(folder / "rows"))
    mapped = rows.select("id", outputs(col("id"), col("text")).alias("outputs")).select("id", "outputs.*")
    table = mapped.toArrow().to_pylist()
    session.stop()
    return table


ENGINES = {"ray": run_ray, "datasets": run_datasets, "spark": run_spark}


def write_table(folder: Path) -> None:
    rows = make_rows()
    for number in range(FILES):
        part = rows[number * len(rows) // FILES : (number + 1) * len(rows) // FILES]
        table = pyarrow.table(
            {
                "id": pyarrow.array([row for row, _ in part], pyarrow.int64()),
                "text": pyarrow.array([text for _, text in part], pyarrow.binary()),
            }
        )
        (folder / "rows").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, folder / "rows" / f"{number:02}.parquet")


def check(holds: bool, statement: str) -> None:
    """Print what was compared, and end the program if it does not hold."""
    print(f"{'ok' if holds else 'FAILED'}: {statement}", flush=True)
    if not holds:
        sys.exit(1)


def largest_difference(kind: str, outputs: list[dict[str, Any]], folder: Path) -> float:
    """Return the largest difference of the outputs, in the order of the rows, to those of `encode` or `predict`.

    It is infinite if a label differs. An empty line has no prediction.
    """
    computed = [output for output, (_, text) in zip(outputs, make_rows(), strict=True) if text and has_output(text)]
    places = [number for number, text in make_rows() if text and has_output(text)]
    if kind == "encoder":
        expected = np.load(folder / "encoder.npy")[places]
        return float(np.abs(np.array([output["vector"] for output in computed]) - expected).max())
    lines = (folder / "classifier.tsv").read_text().split("\n")
    difference = 0.0
    for output, place in zip(computed, places, strict=True):
        label, probability = lines[place].split("\t")
        if output["label"] != label:
            return np.inf
        difference = max(difference, abs(output["probability"] - float(probability)))
    return difference


def check_outputs(name: str, kind: str, outputs: list[dict[str, Any]], folder: Path) -> None:
    outputs = sorted(outputs, key=lambda output: output["id"])
    rows = make_rows()
    check(
        [output["id"] for output in outputs] == [number for number, _ in rows], f"{name}: {len(rows)} rows, each once"
    )
    expected = [number for number, text in rows if not has_output(text)]
    errors = {output["id"]: output["error"] for output in outputs if output["error"]}
    check(sorted(errors) == expected, f"{name}: {len(errors)} rows with an error, such as {errors[expected[0]]!r}")
    difference = largest_difference(kind, outputs, folder)
    check(difference <= TOLERANCE, f"{name}: outputs differ by at most {difference:.1e}")


def main(folder: Path, engines: list[str]) -> None:
    check(importlib.util.find_spec("fairseq") is None, "this environment has no fairseq")
    write_table(folder)
    for engine in engines:
        run = ENGINES[engine]
        for kind in ("encoder", "classifier"):
            name = f"{engine}, {kind}"
            options = {"directory": str(folder / f"{kind}-exported")}
            marker = folder / f"{engine}-{kind}"
            outputs = run(MapperKilledOnce, options | {"marker": str(marker)}, folder, 2)
            check(marker.exists(), f"{name}: one of two workers was killed at row {KILLED_AT}")
            check_outputs(name, kind, outputs, folder)
            if engine == "ray" and kind == "encoder":
                check_outputs("ray, resumed", kind, run_ray_resumed(options, folder), folder)
        for workers in (1, 2):
            begin = time.monotonic()
            outputs = run(TextMapper, {"directory": str(folder / "encoder-exported")}, folder, workers)
            seconds = time.monotonic() - begin
            print(f"{engine}, encoder, workers {workers}: {len(outputs) / seconds:.0f} texts/s with start", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
