"""Gates: what each variable says, which one wins, and what is wrong with the settings."""

from __future__ import annotations

import pytest

from vllm_hotfix import HotfixError
from vllm_hotfix._catalog import CATALOG
from vllm_hotfix._patch import FAULTS, STATES, Gate, Patch, Problem, Target, own_variables, read_flag, read_gates


def make(name: str, **fields: object) -> Patch:
    """A patch that is nothing but gates."""
    defaults = {"fault": "a fault", "upstream": "example/vllm#1", "targets": (Target("vllm.m:f", "f"),)}
    return Patch(name=name, env=f"VLLM_HOTFIX_{name.upper()}", **(defaults | fields))  # type: ignore[arg-type]


FIRST = make("first", aliases=("VLLM_FIRST", "VLLM_FIRST_OLD"))
SECOND = make("second", values=("force",))
THIRD = make("third", requires=("second",))
ALL = (FIRST, SECOND, THIRD)


def gates_of(patches: tuple[Patch, ...] = ALL, **environ: str) -> dict[str, Gate]:
    """The gates where the settings have no fault."""
    gates, problems = read_gates(patches, environ)
    assert problems == []
    return gates


def on(patches: tuple[Patch, ...] = ALL, **environ: str) -> set[str]:
    """The names of the patches that are on."""
    return {name for name, gate in read_gates(patches, environ)[0].items() if gate.on}


def problems_of(**environ: str) -> list[str]:
    """What is wrong with the settings, as a person reads it."""
    return [str(problem) for problem in read_gates(ALL, environ)[1]]


def test_unset_is_off() -> None:
    """Without a variable every gate is off and names the variable that would turn it on."""
    gate = gates_of()["first"]
    assert gate == Gate(False, "VLLM_HOTFIX_FIRST", None, "VLLM_HOTFIX_FIRST is not set")
    assert on() == set()


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "TRUE", "Yes", "oN", " 1 ", "on\n"])
def test_values_that_turn_on(value: str) -> None:
    """Four words in any case, blanks around them aside, turn a patch on, and the gate says by what."""
    gate = gates_of(VLLM_HOTFIX_FIRST=value)["first"]
    assert gate == Gate(True, "VLLM_HOTFIX_FIRST", value.strip(), "turned on by VLLM_HOTFIX_FIRST")


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "False", "NO", "Off", " 0 "])
def test_values_that_turn_off(value: str) -> None:
    """Four words turn a patch off; that is no problem, and the gate says by what."""
    gate = gates_of(VLLM_HOTFIX_FIRST=value)["first"]
    assert gate == Gate(False, "VLLM_HOTFIX_FIRST", value.strip(), "turned off by VLLM_HOTFIX_FIRST")


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_variable_is_not_set(value: str) -> None:
    """``VLLM_HOTFIX_FIRST=`` in a compose file means that nothing was chosen: the alias and ENABLE then decide."""
    assert gates_of(VLLM_HOTFIX_FIRST=value)["first"].value is None
    assert on(VLLM_HOTFIX_FIRST=value, VLLM_FIRST="1") == {"first"}
    assert on(VLLM_HOTFIX_FIRST=value, VLLM_HOTFIX_ENABLE="first") == {"first"}


@pytest.mark.parametrize("value", ["maybe", "2", "01", "-1", "enable", "1,0", "force", "yes please", "ja", "tru\u00e9"])
def test_a_value_that_is_not_understood_is_off_and_a_problem(value: str) -> None:
    """One problem names the variable, the value and the patch; ENABLE cannot turn the patch on behind it."""
    gates, problems = read_gates(ALL, {"VLLM_HOTFIX_FIRST": value, "VLLM_HOTFIX_ENABLE": "first"})
    assert gates["first"].on is False
    assert gates["first"].value == value
    (problem,) = problems
    assert problem.variable == "VLLM_HOTFIX_FIRST"
    assert repr(value) in problem.reason
    assert "first stays off" in problem.reason


def test_a_patch_can_accept_values_of_its_own() -> None:
    """``force`` is a value of the patch that lists it, in any case, and of no other."""
    assert on(VLLM_HOTFIX_SECOND="Force", VLLM_HOTFIX_FIRST="force") == {"second"}
    assert "1 true yes on force 0 false no off" in problems_of(VLLM_HOTFIX_SECOND="maybe")[0]
    assert gates_of(VLLM_HOTFIX_SECOND="Force")["second"].value == "Force", "the patch reads it from there"


def test_an_alias_is_the_gate_where_the_own_variable_is_not_set() -> None:
    """Upstream's name counts like the own one, and the gate names the one that decided."""
    gate = gates_of(VLLM_FIRST="on")["first"]
    assert gate == Gate(True, "VLLM_FIRST", "on", "turned on by VLLM_FIRST")
    assert gates_of(VLLM_FIRST_OLD="1")["first"].variable == "VLLM_FIRST_OLD"


def test_the_own_variable_wins_over_its_aliases() -> None:
    """The own variable decides in both directions, then the aliases in their order."""
    assert on(VLLM_HOTFIX_FIRST="0", VLLM_FIRST="1") == set()
    assert on(VLLM_HOTFIX_FIRST="1", VLLM_FIRST="0") == {"first"}
    assert on(VLLM_FIRST="0", VLLM_FIRST_OLD="1") == set()


def test_a_bad_value_of_an_alias_is_a_problem_too() -> None:
    """The problem names the alias, which is what the person has set."""
    (problem,) = problems_of(VLLM_FIRST="maybe")
    assert problem.startswith("VLLM_FIRST: 'maybe'")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("first", {"first"}),
        ("FIRST", {"first"}),
        ("first,second", {"first", "second"}),
        (" first , second ,", {"first", "second"}),
        (",,", set()),
        ("", set()),
        ("all", {"first", "second", "third"}),
        ("All", {"first", "second", "third"}),
        ("first,all", {"first", "second", "third"}),
    ],
)
def test_enable_takes_a_list_or_all(value: str, expected: set[str]) -> None:
    """Names in any case, blanks and empty items aside; ``all`` anywhere in the list is all."""
    assert on(VLLM_HOTFIX_ENABLE=value) == expected
    assert problems_of(VLLM_HOTFIX_ENABLE=value) == []


def test_enable_is_named_as_what_decided() -> None:
    """The gate's variable and value are ENABLE and its list."""
    gate = gates_of(VLLM_HOTFIX_ENABLE="first,second")["first"]
    assert gate == Gate(True, "VLLM_HOTFIX_ENABLE", "first,second", "turned on by VLLM_HOTFIX_ENABLE")


def test_the_own_variable_wins_over_enable() -> None:
    """``ENABLE=all`` with one patch's own variable off is all but that one."""
    assert on(VLLM_HOTFIX_ENABLE="all", VLLM_HOTFIX_FIRST="0") == {"second", "third"}
    assert on(VLLM_HOTFIX_ENABLE="all", VLLM_FIRST="0") == {"second", "third"}, "an alias is its own variable"


@pytest.mark.parametrize("value", ["first", "all", " First ", "second,first"])
def test_disable_wins_over_everything(value: str) -> None:
    """Own variable, alias and ENABLE all say on; DISABLE says off, and the gate names it."""
    gates = gates_of(VLLM_HOTFIX_DISABLE=value, VLLM_HOTFIX_FIRST="1", VLLM_FIRST="1", VLLM_HOTFIX_ENABLE="all")
    assert gates["first"] == Gate(False, "VLLM_HOTFIX_DISABLE", value, "turned off by VLLM_HOTFIX_DISABLE")


@pytest.mark.parametrize("variable", ["VLLM_HOTFIX_ENABLE", "VLLM_HOTFIX_DISABLE"])
@pytest.mark.parametrize("value", ["frist", "first,frist", "all,frist", "frist,all"])
def test_an_unknown_name_is_a_problem(variable: str, value: str) -> None:
    """One problem names the variable, the name and the names there are; the rest of the list counts."""
    (problem,) = problems_of(**{variable: value})
    assert problem == f"{variable}: there is no patch 'frist'; there are: all, first, second, third"
    assert ("first" in on(**{variable: value})) is (variable == "VLLM_HOTFIX_ENABLE" and value != "frist")


def test_a_bad_value_of_a_disabled_patch_is_still_a_problem() -> None:
    """What is wrong with a setting is said even where another one wins."""
    assert len(problems_of(VLLM_HOTFIX_DISABLE="all", VLLM_HOTFIX_FIRST="maybe")) == 1


def test_a_required_patch_is_turned_on_too() -> None:
    """The required patch is on with its requirer's variable, and says why."""
    gates = gates_of(VLLM_HOTFIX_THIRD="1")
    assert gates["third"].on
    assert gates["second"] == Gate(True, "VLLM_HOTFIX_THIRD", "1", "turned on by third, which requires it")


@pytest.mark.parametrize("environ", [{"VLLM_HOTFIX_SECOND": "0"}, {"VLLM_HOTFIX_DISABLE": "second"}])
def test_a_required_patch_that_is_turned_off_takes_its_requirer_along(environ: dict[str, str]) -> None:
    """Off by name wins, and the requirer says what it lacks and by which variable."""
    gates = gates_of(VLLM_HOTFIX_THIRD="1", **environ)
    assert not gates["second"].on
    assert not gates["third"].on
    (variable,) = environ
    assert gates["third"].variable == variable
    assert gates["third"].reason == f"requires second, which is off: turned off by {variable}"


def test_requirements_are_followed_through() -> None:
    """A chain is turned on to its end in any order of the catalog; a break in it turns off all that build on it."""
    a, b, c = make("a", requires=("b",)), make("b", requires=("c",)), make("c")
    for order in ((a, b, c), (c, b, a)):
        assert on(order, VLLM_HOTFIX_A="1") == {"a", "b", "c"}
        assert on(order, VLLM_HOTFIX_A="1", VLLM_HOTFIX_C="0") == set()
        assert on(order, VLLM_HOTFIX_A="1", VLLM_HOTFIX_B="0") == set()


def test_what_was_turned_on_only_for_a_requirer_that_is_off_is_off_again() -> None:
    """A patch that needs two others, one of them off, runs neither: nobody has asked for the other one."""
    patches = (make("a", requires=("b", "c")), make("b"), make("c"))
    assert on(patches, VLLM_HOTFIX_A="1", VLLM_HOTFIX_C="0") == set()


def test_patches_that_require_each_other_are_on_together() -> None:
    """A circle ends, and one of them turns on both."""
    circle = (make("a", requires=("b",)), make("b", requires=("a",)))
    assert on(circle, VLLM_HOTFIX_B="1") == {"a", "b"}
    assert on(circle) == set()


@pytest.mark.parametrize("name", ["VLLM_HOTFIX_FRIST", "VLLM_HOTFIX_ENABLED", "VLLM_HOTFIX_", "VLLM_HOTFIX_first"])
def test_a_misspelt_variable_is_a_problem(name: str) -> None:
    """Whoever misspells a gate would believe that the patch is on."""
    (problem,) = problems_of(**{name: "1"})
    words = "no patch of this vllm-hotfix has this variable; is it misspelt, or of another version?"
    assert problem == f"{name}: {words}"


def test_upstreams_name_for_a_patch_that_is_not_there_is_a_problem() -> None:
    """Whoever sets it would believe that the patch is on, and vLLM is told that the variable is known."""
    (problem,) = problems_of(VLLM_RELOAD_KEEP_MOE_KERNEL="1")
    assert problem.startswith("VLLM_RELOAD_KEEP_MOE_KERNEL: no patch of this vllm-hotfix has this variable")


def test_other_variables_are_no_concern() -> None:
    """Neither the package's own settings nor those of vLLM are taken for a misspelt gate."""
    gates_of(VLLM_HOTFIX_STATE_DIR="/x", VLLM_HOTFIX_STRICT="0", VLLM_USE_V1="1", VLLM_FIRST="0", VLLM_HOTFIXES="1")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("On", True), ("0", False), ("", False), (" no ", False)])
def test_flags(value: str, expected: bool) -> None:
    """STRICT takes the same words as a gate."""
    problems: list[Problem] = []
    assert read_flag("VLLM_HOTFIX_STRICT", {"VLLM_HOTFIX_STRICT": value}, problems) is expected
    assert problems == []
    assert read_flag("VLLM_HOTFIX_STRICT", {}) is False


def test_a_flag_that_is_not_understood_is_off_and_a_problem() -> None:
    """``VLLM_HOTFIX_STRICT=maybe`` is said, and the engine starts."""
    (problem,) = problems_of(VLLM_HOTFIX_STRICT="maybe")
    assert problem.startswith("VLLM_HOTFIX_STRICT: 'maybe'")
    assert read_flag("VLLM_HOTFIX_STRICT", {"VLLM_HOTFIX_STRICT": "maybe"}) is False


def test_own_variables_are_the_prefix_and_the_aliases() -> None:
    """These are made known to vLLM, set to whatever; others are not this package's."""
    environ = {"VLLM_HOTFIX_FIRST": "0", "VLLM_FIRST_OLD": "", "VLLM_HOTFIX_TYPO": "1", "VLLM_OTHER": "1"}
    assert own_variables(ALL, environ) == ["VLLM_HOTFIX_FIRST", "VLLM_FIRST_OLD", "VLLM_HOTFIX_TYPO"]


def test_releases_in_words() -> None:
    """A patch says where its fault is."""
    assert make("a", since="0.20.0").releases == ">=0.20.0"
    assert make("a", since="0.20.0", fixed_in="0.31.0").releases == ">=0.20.0,<0.31.0"


def test_known_names_are_targets_and_helpers() -> None:
    """Both must be known code, the targets first."""
    assert make("a", relies=("vllm.m:helper",)).known_names == ("vllm.m:f", "vllm.m:helper")


def test_faults_are_states_and_the_error_is_a_runtime_error() -> None:
    """What stops a strict engine is one of the states, and what is raised is what vLLM's own start-up errors are."""
    assert set(FAULTS) < set(STATES)
    assert issubclass(HotfixError, RuntimeError)


@pytest.mark.parametrize("patch", CATALOG, ids=lambda patch: patch.name)
def test_the_catalog_is_consistent(patch: Patch) -> None:
    """Gates are named after their patches, required patches exist, wrappers exist, the lock knows every name."""
    import importlib

    from vllm_hotfix._upstream import Lock

    assert patch.env == f"VLLM_HOTFIX_{patch.name.upper()}"
    assert patch.name == patch.name.lower() != "all"
    assert set(patch.requires) <= {other.name for other in CATALOG}
    module = importlib.import_module(f"vllm_hotfix._patches.{patch.name}")
    assert module.PATCH is patch
    assert all(callable(getattr(module, target.wrapper)) for target in patch.targets)
    assert set(patch.known_names) <= set(Lock.load().targets)
    names = [other.name for other in CATALOG]
    assert len(set(names)) == len(names)
