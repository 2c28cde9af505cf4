"""Run the example of README and the new attention of docs/attentions.md, whose table must list the registry."""

import json
import re
import statistics

import torch

from lln_fairseq.attention import ATTENTION_REGISTRY, MECHANISMS, build_attention
from tests.documentation import README, ROOT, code_blocks

ATTENTIONS = ROOT / "docs/attentions.md"


def test_first_example_runs(capsys):
    names = {}
    (code,) = code_blocks(README, "python")
    exec(code, names)
    assert names["out"].isfinite().all()
    assert capsys.readouterr().out == "torch.Size([2, 12, 4096, 64])\n"
    assert "print(out.shape)  # torch.Size([2, 12, 4096, 64])\n" in code


def test_new_attention_example_registers_and_matches_its_matrix(monkeypatch):
    registry = {}
    monkeypatch.setattr("lln_fairseq.attention.registry.ATTENTION_REGISTRY", registry)
    (code,) = [block for block in code_blocks(ATTENTIONS, "python") if "shifted_relu" in block]
    exec(code, {"__name__": "example"})
    monkeypatch.setitem(ATTENTION_REGISTRY, "shifted_relu", registry["shifted_relu"])
    monkeypatch.setattr("lln_fairseq.attention.registry.ATTENTION_REGISTRY", ATTENTION_REGISTRY)

    attention = build_attention("shifted_relu", num_heads=2, head_dim=8, max_positions=9, shift=0.1)
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(q, k, v), attention.attention_matrix(q, k) @ v)


def test_attention_table_is_complete():
    page = ATTENTIONS.read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    missing = sorted(set(MECHANISMS) - listed)
    unknown = sorted(listed - set(MECHANISMS))
    assert not missing, f"docs/attentions.md has no row for {', '.join(missing)}: add | `{missing[0]}` | what it is |"
    assert not unknown, f"docs/attentions.md has rows for {', '.join(unknown)}, which are not registered"


def read_result(name):
    return json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))


def update_speed(attention, length):
    """Return how many times as fast as softmax a training update of preset small is on a CPU."""
    times = {}
    for row in read_result("iteration_times.json")["times"][0]["rows"]:
        times[row["attention"], row["column"]] = row["time"][0]
    return times["softmax", length] / times[attention, length]


def update_speed_on_gpu(attention, length):
    (updates,) = read_result("gpu_times.json")["updates"]
    rates = updates["thousand_tokens_per_second"]
    return rates[attention][length] / rates["softmax"][length]


def prediction_speed(name, length, attention, device="CPU"):
    """Return how many times as fast as softmax a prediction of MiniLM is, on the file's first device of a kind."""
    times = [times for times in read_result(name)["times"] if device in times["device"]]
    row = times[0]["milliseconds"]["minilm"][length]
    return row["softmax"] / row[attention]


def mean_score(name, kind, task, attention, stage, rows="test"):
    scores = []
    for row in read_result(name)["rows"]:
        if (row["kind"], row["task"], row["attention"]) == (kind, task, attention):
            scores.append(row["scores"][stage][rows])
    return 100 * statistics.mean(scores)


def last_bits(name, attention):
    """Return the loss of the longest run of an attention."""
    runs = [row for row in read_result("wikipedia.json")[name] if row["attention"] == attention]
    return max(runs, key=lambda row: row["updates"][-1])["bits"][-1]


def window_speed(tokens):
    """Return how many times as fast as sdpa all layers of ModernBERT's sizes are with lln_window, in one thread."""
    milliseconds = {}
    for run in read_result("window_times.json")["rows"]:
        if run["threads"] == 1:
            for row in run["results"]:
                milliseconds[row["attention"], row["tokens"]] = row["milliseconds"]
    return milliseconds["sdpa", tokens] / milliseconds["lln_window", tokens]


def searched(case):
    """Return the cells of the first search of a case: speed on a CPU and a GPU, the new score, the original one."""
    test = next(row["test"] for row in read_result("speedup.json")["rows"] if row["case"] == case)
    return [f"{test['times_as_fast']:.1f}", "-", f"{test['score']:.1f} %", f"{test['original']:.1f} %"]


def test_table_shows_the_stored_numbers():
    lines = README.read_text(encoding="utf-8").splitlines()
    rows = {}
    for line in lines:
        cells = [cell.strip(" †") for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6:
            rows[cells[0]] = cells[2:]
    blocks = "block_diag:block_size=128,global_tokens=first_segment"
    joint = "lln_diag:mix=joint_offset,gain=learned,block_size=32"
    expected = {
        "serve short texts (SST-2)": searched("sst2"),
        "classify a question and 555 tokens": searched("qnli16"),
        "classify a question and 2,140 tokens": [
            f"{prediction_speed('long_pairs.json', '2140', blocks):.1f}",
            f"{prediction_speed('long_pairs.json', '2140', blocks, 'H100'):.1f}, slower",
            f"{mean_score('long_pairs.json', 'fine_tuning', 'qnli64', 'block_diag_global', 'trained'):.1f} %",
            f"{mean_score('long_pairs.json', 'fine_tuning', 'qnli64', 'softmax', 'trained'):.1f} %",
        ],
        "make an encoder linear, without labels, 512 tokens": [
            f"{prediction_speed('conversion.json', '512', joint):.1f}",
            "-",
            f"{mean_score('conversion.json', 'conversion', 'qnli', 'joint_offset', 'linearized', 'all'):.1f} %",
            f"{mean_score('conversion.json', 'conversion', 'qnli', 'joint_offset', 'softmax', 'all'):.1f} %",
        ],
        "compare two texts": [
            "-",
            "-",
            f"{mean_score('two_texts.json', 'conversion', 'qqp4', 'joint_offset_softmax', 'distilled'):.1f} %",
            f"{mean_score('two_texts.json', 'conversion', 'qqp4', 'joint_offset_softmax', 'softmax'):.1f} %",
        ],
        "pre-train on 8,192 tokens": [
            f"{update_speed('local_global', '8192'):.1f}",
            "-",
            f"{last_bits('larger_model', 'window:block_size=64'):.2f} bits",
            f"{last_bits('larger_model', 'softmax'):.2f} bits",
        ],
        "pre-train as in the paper, 8,192 tokens": [
            f"{update_speed('lln_diag', '8192'):.1f}",
            f"{update_speed_on_gpu('lln_diag', '8192'):.1f}",
            f"{last_bits('rows', 'lln_diag'):.2f} bits",
            f"{last_bits('rows', 'softmax'):.2f} bits",
        ],
        "pre-train as in the paper, 512 tokens": [
            f"{update_speed('lln_diag', '512'):.1f}",
            f"{update_speed_on_gpu('lln_diag', '512'):.1f}, slower",
            "-",
            "-",
        ],
        "run ModernBERT on 8,192 tokens, untrained weights": [f"{window_speed(8192):.1f}", "-", "the same", "-"],
    }
    for use, cells in expected.items():
        assert rows[use] == cells, use
