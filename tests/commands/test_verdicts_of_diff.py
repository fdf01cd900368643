"""What `diff` says of tensors, how it puts memory back, and the line that commands show while they work."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from coda_inductor.commands import diff
from coda_inductor.commands.differences.reached import Subject
from coda_inductor.commands.differences.runs import Found, Reference, Run, observed
from coda_inductor.commands.progress import progress
from coda_inductor.commands.walk import leaves
from coda_inductor.core.settings import Settings


def found(value: Tensor) -> Found:
    return Found("output", value, value.stride())


def compared(theirs: Tensor, wanted: Tensor) -> diff.Compared:
    subject = Subject(lambda: None, (), {})
    right = Reference("float64", "", Run({"x": found(wanted)}))
    return diff.Compared(
        subject, "infer", Settings(target="reference"), Run({"x": found(theirs)}), right, torch.float64
    )


def judged(ours: Tensor, theirs: Tensor, wanted: Tensor) -> tuple[bool, str]:
    row = compared(theirs, wanted).row("x", Run({"x": found(ours)}))
    return row["wrong"], row["verdict"]


X = torch.linspace(1, 2, 96, dtype=torch.float64).reshape(8, 12)
SHIFT = torch.where(torch.arange(96).reshape(8, 12) % 2 == 0, 1.0, -1.0).double()


@pytest.mark.parametrize(
    ("ours", "theirs", "wrong", "said"),
    [
        (X, X, False, "the same bits as Inductor"),
        (X + 1.4e-6 * SHIFT, X + 1e-6 * SHIFT, False, "coda 1.40x of Inductor's error"),
        (X + 1.6e-6 * SHIFT, X + 1e-6 * SHIFT, True, "WRONG: coda 1.60x of Inductor's error, allowed 9.8e-07"),
        (X.where(X != 2, 2 + 4.5e-16), X, False, "Inductor is exact; within the floor"),
        (X + 1e-12, X, True, "WRONG: Inductor is exact, allowed 1.1e-16"),
        (X * 12, X * 3, False, "coda 5.50x of Inductor's error; which exceeds the value"),
        (X.float(), X, True, "WRONG: dtype torch.float32, Inductor's is torch.float64"),
        (X[:4], X, True, "WRONG: shape [4, 12], Inductor's is [8, 12]"),
        (X.t().contiguous().t(), X, True, "WRONG: strides (1, 8), Inductor's are (12, 1)"),
        (X.where(X != 1, torch.nan), X, True, "WRONG: 1 not finite"),
    ],
)
def test_verdicts(ours: Tensor, theirs: Tensor, wrong: bool, said: str) -> None:
    assert judged(ours, theirs, X) == (wrong, said)


def test_verdicts_of_labels() -> None:
    """One of 200 may be another where scores are equal, but not two; of a counter nothing may."""
    labels = torch.arange(200)
    near, far = labels.clone(), labels.clone()
    near[3], far[:3] = 0, 7
    assert not judged(near, labels, labels)[0] and judged(far, labels, labels)[0]
    assert judged(torch.tensor(2), torch.tensor(1), torch.tensor(1))[0]


def test_infinities_that_are_meant() -> None:
    mask = torch.zeros(8, 12).fill_diagonal_(-torch.inf)
    assert judged(mask, mask, mask.double()) == (False, "the same bits as Inductor")
    assert judged(-mask, mask, mask.double()) == (True, "WRONG: 8 not finite")


def test_missing_tensors_values_and_shared_memory_are_named() -> None:
    one, two = compared(X, X), Run({"x": found(X)}, others={"output[1]": "3"}, sharing={frozenset(("output", "x"))})
    facts = diff.judged(one, two)
    assert facts["problems"] == [
        "output[1] is 3 by coda and nothing by Inductor",
        "output and x share memory by coda, and not so by Inductor",
    ]
    assert diff.judged(one, Run())["problems"] == ["x: coda gave none"]


def test_twenty_rows_and_the_count_of_the_others() -> None:
    names = [f"x{i:02}" for i in range(25)]
    many = [Run({name: found(X + (i + 1) * 1e-9 * SHIFT) for i, name in enumerate(names)}) for _ in range(2)]
    right = Reference("float64", "", Run({name: found(X) for name in names}))
    one = diff.Compared(
        Subject(lambda: None, (), {}), "infer", Settings(target="reference"), many[0], right, torch.float64
    )
    lines = diff.render(diff.judged(one, many[1])).splitlines()
    assert sum(line.startswith("x") for line in lines) == 20 and "and 5 more below 1.00x" in lines


def test_memory_that_is_shared_stays_shared() -> None:
    base = torch.arange(12.0)
    subject = Subject(lambda x, y: None, (base[2:8].view(2, 3), base[::2]), {})
    x, y = subject.first.values()
    assert [*subject.first] == ["x", "y"]
    for dtype, wanted in ((torch.float64, torch.float64), (None, torch.float32)):
        x.add_(5)
        subject.put_back(dtype)
        assert x.dtype == y.dtype == wanted and torch.equal(x.flatten(), torch.arange(2.0, 8, dtype=wanted))
        x[0, 0] = -1
        assert y[1] == -1 and subject.changed(dtype).keys() == {"x", "y"}


def test_a_line_on_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("compiling") as say:
        say("timing")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    with progress("compiling", shown=False):
        pass
    assert capsys.readouterr().err == ""
    with progress("compiling") as say:
        say("timing")
    assert "timing" in capsys.readouterr().err


def test_few_numbers_may_be_lucky_but_not_wrong() -> None:
    """A loss whose error is 59 times Inductor's: 1.5 % for 0.026 %. With 0.35 % it may be chance."""
    loss = torch.tensor(3.0, dtype=torch.float64)
    one = replace(compared((loss * (1 + 2.6e-4)).float(), loss), narrowest=torch.bfloat16)
    rows = [one.row("x", Run({"x": found((loss * (1 + error)).float())})) for error in (1.5e-2, 3.5e-3)]
    assert [row["wrong"] for row in rows] == [True, False]


def test_where_the_reference_is_zero_inductor_says_how_much_is_noise() -> None:
    zero = torch.zeros(100, dtype=torch.float64)
    noise = [judged(zero + x, zero + 1e-9, zero)[0] for x in (0.0, 5e-9, 2e-8, 1e3)]
    assert noise == [False, False, True, True]


def test_numbers_whose_squares_are_not_finite() -> None:
    assert judged(X * 2e200, X * 1e200, X * 1e200)[0] and not judged(X * 1e200, X * 1e200, X * 1e200)[0]


def test_what_is_lost_is_looked_at_place_by_place() -> None:
    theirs, ours = X.clone(), X.clone()
    theirs[0, 0], ours[5, 5] = torch.inf, torch.nan
    assert judged(ours, theirs, X) == (True, "WRONG: 1 not finite, 1 of Inductor's")


def test_a_scalar_against_inductor_alone() -> None:
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    alone = replace(compared(one, one), reference=None, narrowest=torch.bfloat16)
    rows = [alone.row("x", Run({"x": found(one * factor)})) for factor in (1.4, 1.05)]
    assert [row["wrong"] for row in rows] == [True, False]


def test_what_only_the_reference_gave_is_not_called_right() -> None:
    facts = diff.judged(compared(X, X), Run({"x": found(X)}))
    assert facts["not_compared"] == []
    none = replace(compared(X, X), inductor=Run())
    assert diff.judged(none, Run())["not_compared"] == ["x: coda and Inductor gave none"]


class Past:
    """As a cache of keys is: a plain object that holds tensors in a list."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Stateful(nn.Module):
    """State of all the kinds that are no buffer, and a norm that its author keeps frozen."""

    def __init__(self) -> None:
        super().__init__()
        self._step, self.seen, self.table = torch.zeros(()), [1], dict[int, Tensor]()
        self.norm = nn.BatchNorm1d(3)

    def train(self, mode: bool = True) -> Stateful:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor, past: Past) -> Past:
        self._step.add_(1)
        self.seen.append(2)
        self.table[0] = x * self._step
        past.keys.append(self.norm(x) * self._step)
        return past


def test_what_a_run_leaves_is_put_back_before_the_next() -> None:
    model, past = Stateful(), Past()
    subject = Subject(model, (torch.randn(4, 3), past), {})
    runs = [observed(subject, "train", model) for _ in range(2)]
    first, second = (run.found["output.keys[0]"].value for run in runs)
    assert torch.equal(first, second) and "output.keys[1]" not in runs[1].found
    overwritten = {name.partition(", ")[0] for name in runs[0].found if name.endswith(", overwritten")}
    assert overwritten == {"_step", "table.0", "past.keys[0]"}
    subject.put_back()
    assert float(model._step) == 0 and model.seen == [1] and not model.table and not past.keys


class Slots:
    """An object without a dict."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys = [torch.zeros(3)]


class Uncounted(nn.Module):
    """Layers in a plain list, state in an object with slots, and a counter that nobody can set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.count, self.state = [nn.Linear(3, 3)], itertools.count(), Slots()

    def forward(self, x: Tensor) -> Tensor:
        next(self.count)
        self.state.keys = [self.state.keys[0] + 1]
        out: Tensor = self.layers[0](x) * self.state.keys[0]
        return out


def test_lists_of_layers_and_slots_are_reached_and_what_cannot_be_put_back_is_said() -> None:
    model = Uncounted()
    subject = Subject(model, (torch.randn(2, 3),), {})
    assert {"layers[0].weight", "layers[0].bias", "state.keys[0]"} <= subject.first.keys()
    first, second = (observed(subject, "train", model) for _ in range(2))
    assert torch.equal(first.found["output"].value, second.found["output"].value)
    assert "gradient of layers[0].weight" in second.found
    assert second.unseen == ["count, whose state cannot be put back between runs"] and not first.unseen


def test_what_a_function_reads_through_containers_and_functions_is_reached() -> None:
    held = {"w": [torch.randn(3, 3, requires_grad=True)]}

    def read() -> Tensor:
        return held["w"][0]

    subject = Subject(lambda x: x @ read(), (torch.randn(2, 3),), {})
    assert [*subject.first] == ["x", "held.w[0]"]
    run = observed(subject, "train", subject.model)
    assert "gradient of held.w[0]" in run.found and not run.unseen


def test_a_weight_that_nobody_names_is_said() -> None:
    hidden = torch.randn(3, 3, requires_grad=True)
    call = functools.partial(torch.mm, mat2=hidden)
    run = observed(Subject(torch.mm, (torch.randn(2, 3),), {}), "train", call)
    assert run.unseen == ["the gradient of a weight [3, 3] that no module or argument holds"]
    assert hidden.grad is None


def test_what_holds_itself_ends() -> None:
    loop: list[object] = [torch.ones(2)]
    loop.append(loop)
    assert [name for name, _ in leaves("output", loop)] == ["output[0]"]


def test_complex_numbers_are_widened() -> None:
    model = nn.Identity()
    run = observed(Subject(model, (torch.ones(2, dtype=torch.complex64),), {}), "infer", model, torch.float64)
    assert run.found["output"].value.dtype == torch.complex128


def test_what_cannot_be_compared_is_not_called_right() -> None:
    comparison = compared(torch.ones(3), torch.ones(3))
    ours = Run({"x": found(torch.ones(3))}, unseen=["output.past, of Opaque"])
    said = diff.render(diff.judged(comparison, ours))
    assert "not compared: output.past, of Opaque" in said and "nothing that was compared is wrong" in said
    empty = diff.Compared(comparison.subject, "infer", Settings(), Run(), None, torch.float32)
    assert diff.judged(empty, Run())["problems"] == ["the model leaves no tensor that could be compared"]
