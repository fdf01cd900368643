"""What all tests share: reproducible examples, no settings from the shell, and GPU tests only with a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: threads of theirs would wait for each other's
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from quick import quick
from sampling import chosen

from coda_inductor.core import errors
from coda_inductor.kernels import launch, library

quick()
gc.set_threshold(50_000, 20, 100)  # graphs are many small objects that live long: 100 s for 109
library.made_by()  # kept for the process: of the true versions, before a test pretends others
settings.register_profile("default", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees the settings that it makes, not those of the shell it was started from."""
    for variable in [v for v in os.environ if v.startswith("CODA_INDUCTOR")]:
        monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure is warned about once in a process, and counted: in each test it is a new one."""
    monkeypatch.setattr(errors, "said", set())
    launch.FALLBACKS.clear()


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random tensors in every run and in every order of tests."""
    torch.manual_seed(0)


@pytest.fixture
def uncached() -> Iterator[None]:
    """Every compile runs our pass: nothing comes from Inductor's caches."""
    import torch._functorch.config
    import torch._inductor.config

    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def interpreted(uncached: None) -> Iterator[None]:
    """The graphs that Inductor would compile are interpreted: where a test asks what a rewritten graph computes, C++
    compilers take most of the time. What Inductor makes of rewritten graphs is tested in tests/effects and others."""
    from evaluate import interpreting

    with interpreting():
        yield


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch, uncached: None) -> None:
    """Every output beside a loss counts as large, and every compile is new."""
    from coda_inductor.inductor import undefined
    from coda_inductor.inductor.joint_pass import REPORTS

    monkeypatch.setattr(undefined, "LARGE", 1)
    torch._dynamo.reset()
    REPORTS.clear()


LONG = (
    "compiled_cases",
    "effects",
    "random_effects",
    "training_bf16",
    "training_models",
    "whole_graphs",
    "coverage",
    "generate",
    "without",
)
TOGETHER = dict.fromkeys(("laws", "lift", "verdicts"), "laws")  # one worker captures their graphs once: 80 s


SLOW = (
    "test_compiled_cases.py::test_every_case_compiles[all]",
    "test_compiled_cases.py::test_the_stage_model_is_quacks[all]",
    "test_compiled_cases.py::test_gradients_spill_nothing_in_the_tile_tried_first[all]",
    "test_compiled_cases.py::test_other_extents_share_the_kernel[all]",
    "test_distributed.py::test_losses_and_gradients_are_eagers[all]",
    "test_targets.py::test_cases_compile_and_fit[sm_103a]",
    "test_random_effects.py::test_most_random_programs_get_regions[all]",
    "test_cancelling.py::test_eagers_are_inductors",
    "test_cli_check.py::test_the_compiler_makes_them_for_any_target",
    "test_cli_kernels.py::test_kernels_of_two_targets_are_kept_apart",
    "test_cli_diff.py::test_a_wrong_law_is_named",
    "test_cli_archive.py::test_what_was_warmed_up_travels[train]",
    "test_training_bf16.py::test_a_model_learns",
    "test_compiling_process.py::test_the_compiling_process_may_end",
    "test_compiling_process.py::test_a_fork_of_the_owner",
    "test_compiling_process.py::test_an_interpreter_may_end",
    "test_compiling_process.py::test_what_is_printed_is_no_answer",
    "test_compiling_process.py::test_a_worker_may_die",
    "test_compiling_process.py::test_workers_fill_the_store",
    "test_caches.py::test_kernels_are_called_from_a_warm_cache",
    "test_caches.py::test_kernel_compiled_by_two_processes_and_broken",
    "test_explain_models.py::test_llama_of_16_layers",
    "test_contest.py::test_a_deeper_model",
    "test_depth.py::test_a_deeper_model",
    "test_generate.py::test_generate[whole]",
    "test_generate.py::test_generate[each_layer]",
    "test_generate.py::test_generate[layer_within]",
    "test_generate.py::test_generate_with_inductors_code",
    "test_without.py::test_it_makes_what_the_group_stands_for[gpt]",
    "test_without.py::test_it_makes_what_the_group_stands_for[bert]",
    "test_coverage.py::test_full_depth",
    "test_coverage.py::test_passes_of_a_layer_left_in_training[bert",
    "test_coverage.py::test_passes_of_a_layer_left_in_training[gpt2",
    "test_coverage.py::test_passes_of_a_layer_left_in_training[vit",
    "test_bench.py::test_coverage_of_small_models",
    "test_debugging.py::test_tlparse_artifact_for_every_graph",
    "test_training_device.py::test_any_losses_leave_a_right_program[bert]",
    "test_training_device.py::test_any_losses_leave_a_right_program[gpt]",
    "test_training_contest.py::test_what_a_losing_law_takes_along_is_not_measured[False]",
    "test_training_contest.py::test_the_backwards_regions_are_counted[False]",
    "test_training_contest.py::test_what_takes_over_is_compiled_while_laws_are_measured",
    "test_training_contest.py::test_what_is_on_disk_is_not_compiled_for_the_other_order",
    "test_training_contest.py::test_what_loses_is_not_compiled_for_the_other_order",
    "test_training_contest.py::test_one_burst_undoes_no_law_narrowly[bursts1]",
    "test_without.py::test_of_equal_programs_the_law_stays_if_it_leaves_nothing_to_the_backward[llama-0]",
    "test_training_models.py::test_no_more_is_kept_or_multiplied_than_by_inductor[vit]",
    "test_training_models.py::test_no_more_is_kept_or_multiplied_than_by_inductor[gpt2]",
    "test_training_models.py::test_gradients_equal_eagers[gemma2]",
    "test_training_models.py::test_gradients_equal_eagers[checkpointed, dropout]",
    "test_training_models.py::test_what_is_checkpointed_is_not_kept",
    "test_training.py::test_gradients_equal_eagers[post-layer-False]",
    "test_one_sample.py::test_its_gradients_are_eagers[Apart-False]",
    "test_one_sample.py::test_its_gradients_are_eagers[Table-False]",
    "test_signs.py::test_no_root_is_taken_where_more_would_be_read",
    "test_schedule.py::test_agrees_where_sums_are_mixed",
    "test_determinism.py::test_processes_give_the_same_bits",
    "test_float8.py::test_gradients_are_about_as_exact_as_inductors[tensorwise-gpt",
    "test_float8.py::test_gradients_are_about_as_exact_as_inductors[rowwise_with_gw_hp",
    "test_docs.py::test_outputs_that_are_quoted[numerics.md]",
    "test_examples.py::test_it_runs[trainer",
    "test_examples.py::test_it_runs[float8",
    "test_examples.py::test_as_a_script",
    "test_examples.py::test_two_ranks",
    "test_using.py::test_with_inductors_code",
    "test_using.py::test_a_command",
    "test_using.py::test_two_ranks_by_torchrun",
    "test_using.py::test_of_two_ranks",
    "test_using.py::test_a_snippet[Dynamic shapes]",
)
"""Tests of 3 to 120 seconds of which others are the short form: `-m slow` runs them, for who changes what they are
about and before a release. Without it they are left out, so that the suite stays short: so are most cases of tests that
are marked as sampled."""


def sample(items: list[pytest.Item]) -> None:
    """Of a sampled test's cases the suite runs a few (sampling.py). The others are slow."""
    cases = dict[tuple[Path, str], list[pytest.Item]]()
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.name.split("[")[0]), []).append(item)
    for found in cases.values():
        few = chosen([item.name for item in found])
        for item in found:
            if item.name not in few:
                item.add_marker("slow")


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
NOT_BY_OLD = {
    "test_distributed.py::test_losses_and_gradients": "tensors without data reach kernels, and as below",
    "test_training.py::test_gradients_equal_eagers[pre-rms-True]": "attention in float64 has no backward on a CPU",
    "test_training.py::test_gradients_equal_eagers[post-layer-False]": "as above",
    "test_training.py::test_gradients_equal_eagers[checkpointed]": "as above",
    "test_training.py::test_nobody_is_warned_of_torchs_own": "as above",
    "test_training_models.py::test_gradients_equal_eagers[llama]": "as above",
    "test_training_models.py::test_gradients_equal_eagers[checkpointed, dropout]": "as above",
    "test_grouped.py::test_compiled_gradients_are_eagers": "as above",
    "test_summed.py::test_gradients_of_what_two_layers_read_meet_in_one_accumulator": "as above",
    "test_training_laws.py::test_the_adjoint_keeps_no_tensor": "as above",
    "test_effects.py::test_through_inductor[drawn_into_a_state-infer]": "draws other numbers than eager",
    "test_random_effects.py::test_a_random_program_is_eagers[83]": "a copy_ within a graph is refused",
    "test_random_effects.py::test_most_random_programs_get_regions": "number 83 is among them",
    "test_schedule.py::test_agrees_where_sums_are_mixed[vit_hf]": "the byte model is 8.7 % off",
    "test_schedule.py::test_loops_run_as_memory_lies[a sum of each head": "as above",
}
"""What stock Inductor of torch 2.11 itself gets wrong or refuses, seen with backend="inductor"; and two of the byte
model's, which is held to torch 2.13 and 2.15."""


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of half a minute and more come first: a worker that meets one last leaves the others without work."""
    first = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path.stem, len(LONG)))
    for item in items:
        if f"{item.path.name}::{item.name}".startswith(SLOW):
            item.add_marker("slow")
    sample(items)
    for item in items if OLD else []:
        for name, why in NOT_BY_OLD.items():
            if f"{item.path.name}::{item.name}".startswith(name):
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__}: {why}"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As --dist loadfile, but for TOGETHER."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Together(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return TOGETHER.get(Path(file).stem.removeprefix("test_"), file)

    return Together(config, log)
