"""Policies by name, by text and from files: what is read, what is refused, and how a new one gets in."""

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import jax.numpy as jnp
import pytest

from jkv.policies import Evict, Policy, describe, entry, format_policy, get_policy, names, preset, register, registry

ROOT = Path(registry.__file__).parents[2]
MINE = '''
from __future__ import annotations

from dataclasses import dataclass

import jkv


@dataclass(frozen=True, kw_only=True)
class Mine(jkv.Evict):
    """Keeps what came first."""

    weight: float | None = 1.0
    needs_queries = False

    def score(self, slots, queries):
        return -slots.pos * self.weight
'''


@pytest.fixture(autouse=True)
def registry_as_it_was():
    before = dict(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)


def test_names_lists_policies_then_presets():
    assert {"full", "gkv", "h2o", "rkv", "sepllm", "snapkv", "streamingllm", "h2o@gkv", "rkv@gkv"} <= {*names()}
    assert names() == sorted(names(), key=lambda name: ("@" in name, name))


@pytest.mark.parametrize("name", names())
def test_every_policy_is_a_documented_value(name):
    policy = entry(name).policy
    assert get_policy(name) == policy
    assert hash(get_policy(name)) == hash(policy)
    assert get_policy(policy) is policy
    assert type(policy).paper.startswith("https://") or name == "random"
    text = type(policy).__doc__ or ""
    for field, _ in describe(policy):
        inherited = "".join(base.__doc__ or "" for base in type(policy).__mro__[:-1])
        assert re.search(rf"^ +([\w, ]+, )?{field}(, [\w, ]+)?: ", inherited, re.M), f"{field} is not documented"
    assert "Exact: " in text


@pytest.mark.parametrize("name", names())
def test_the_text_of_a_policy_reads_back(name):
    policy = entry(name).policy
    assert get_policy(format_policy(name, policy)) == policy
    if isinstance(policy, Evict):
        changed = dataclasses.replace(policy, budget=0.333, floor=300, interval=7)
        text = format_policy(name, changed)
        assert "budget=0.333" in text
        assert get_policy(text) == changed


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("gkv:budget=600,alpha=0.9", {"budget": 600, "alpha": 0.9}),
        ("gkv: budget = 600 , alpha = 1", {"budget": 600, "alpha": 1.0}),
        ("gkv:budget=25%", {"budget": 0.25}),
        ("gkv:budget=33.3%", {"budget": 0.333}),
        ("gkv:budget=0.25", {"budget": 0.25}),
        ("gkv:smooth=sum,normalize=false", {"smooth": "sum", "normalize": False}),
        ("rkv@gkv:window=4", {"window": 4, "pool": 5, "reduce": "probs"}),
        ("sepllm:separators=.,?!,budget=300", {"separators": ".,?!", "budget": 300}),
        ("full", {"interval": 0}),
    ],
)
def test_text_sets_fields(text, fields):
    policy = get_policy(text)
    for key, value in fields.items():
        assert getattr(policy, key) == value
        assert type(getattr(policy, key)) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gvk", "policy 'gvk' does not exist (did you mean 'gkv'?); policies are full, gkv, h2o"),
        ("", "policy '' does not exist"),
        ("gkv:bugdet=3", "'bugdet=3' is not field=value of interval, budget, "),
        ("gkv:bugdet=3", "(did you mean 'budget'?)"),
        ("gkv:budget", "'budget' is not field=value"),
        ("gkv:budget=abc", "policy GKV: budget is 'abc'; it must be int or float"),
        ("gkv:budget=1.0", "policy GKV: budget is 1.0; it must be a number of tokens, or 0.1% to 99.9%"),
        ("gkv:budget=512.0", "budget is 512.0"),
        ("gkv:budget=100%", "budget is 1.0"),
        ("gkv:budget=0%", "budget is 0.0"),
        ("gkv:budget=12.34%", "budget is 0.1234"),
        ("gkv:budget=nan", "budget is nan"),
        ("gkv:budget=0", "budget is 0; it must be more than sink + window = 0 + 16 = 16 tokens"),
        ("gkv:budget=-1", "budget is -1"),
        ("rkv:budget=8,window=8", "budget is 8; it must be more than sink + window = 0 + 8 = 8 tokens"),
        ("gkv:budget=10%,floor=16", "floor is 16; it must be more than"),
        ("gkv:interval=1.5", "interval is '1.5'; it must be int"),
        ("gkv:interval=-1", "interval is -1"),
        ("gkv:window=-1", "window is -1"),
        ("gkv:sink=-1", "sink is -1"),
        ("gkv:window=0", "window is 0; it must be at least 1"),
        ("gkv:alpha=1.5", "alpha is 1.5; it must be between 0 and 1"),
        ("gkv:alpha=nan", "alpha is nan"),
        ("gkv:lam=2", "lam is 2"),
        ("gkv:pool=4", "pool is 4; it must be an odd number"),
        ("gkv:smooth=median", "smooth is 'median'; it must be max or mean or sum"),
        ("gkv:normalize=maybe", "normalize is 'maybe'; it must be bool"),
        ("gkv:threshold=nan", "threshold is nan"),
        ("gkv:window=1,shift=200", "window is 1; it must be at least 2"),
        ("rkv:retain=never", "retain is 'never'; it must be recent or last or first"),
    ],
)
def test_bad_text_is_refused_by_name_and_value(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get_policy(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": "512"}, "budget is '512'"),
        ({"budget": True}, "budget is True"),
        ({"budget": jnp.int32(512)}, "budget is "),
        ({"window": None}, "window is None"),
        ({"interval": 2.0}, "interval is 2.0"),
        ({"smooth": "median"}, "smooth is 'median'"),
        ({"normalize": 1}, "normalize is 1"),
    ],
)
def test_fields_of_another_type_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(entry("gkv").policy, **fields)


@pytest.mark.parametrize("value", [3, None, Evict])
def test_what_is_neither_text_nor_policy_is_refused(value):
    with pytest.raises(ValueError, match="must be a Policy, or text such as"):
        get_policy(value)


def test_a_policy_in_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    policy = get_policy(f"{file}:Mine,budget=300,weight=2")
    assert isinstance(policy, Evict)
    assert dict(describe(policy))["weight"] == 2.0
    assert policy.budget == 300
    assert dict(describe(get_policy(f"{file}:Mine,weight=None")))["weight"] is None
    assert get_policy(f"{file}:Mine,budget=300,weight=2.0") == policy
    assert not {"mine", "Mine"} & {*names()}


def test_files_of_one_name_and_a_file_that_changes(tmp_path):
    specs = []
    for folder, value in (("one", "1.0"), ("two", "2.0")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MINE.replace("1.0", value))
        specs.append(f"{tmp_path / folder / 'mine.py'}:Mine")
    one, two = map(get_policy, specs)
    assert [dict(describe(policy))["weight"] for policy in (one, two)] == [1.0, 2.0]
    assert get_policy(specs[0]) == one
    file = tmp_path / "one" / "mine.py"
    file.write_text(MINE.replace("1.0", "3.0"))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
    assert dict(describe(get_policy(specs[0])))["weight"] == 3.0


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, ":Mine", "does not exist"),
        (MINE, "", "name the class, as in"),
        (MINE, ":Yours", "has no class 'Yours'"),
        (MINE, ":dataclass", "must be a subclass of jkv.Policy"),
        (MINE, ":Mine,weight=heavy", "policy Mine: weight is 'heavy'"),
        ("import nothing_of_this_name", ":Mine", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (MINE.replace(" = 1.0", ""), ":Mine", "every field needs a default value"),
    ],
)
def test_a_bad_policy_file_is_refused_by_its_path(tmp_path, content, name, message):
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get_policy(f"{file}{name}")
    assert "mine.py" in str(error.value) or "Mine" in str(error.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Installed(Evict):
    """A policy of another package."""

    sort: Literal["up", "down"] = "up"

    def score(self, slots, queries):
        return jnp.zeros(slots.pos.shape)


def provide(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    """Makes a package that provides `value` as the policy "installed" look installed."""

    def entry_points(*, group: str, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(load=lambda: value)] if (group, name) == ("jkv.policies", "installed") else []

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_a_policy_of_an_installed_package(monkeypatch):
    provide(monkeypatch, Installed)
    assert "installed" not in names()
    assert get_policy("installed:budget=77,sort=down") == Installed(budget=77, sort="down")
    assert "installed" in names()


def test_an_entry_point_that_is_no_policy_is_refused(monkeypatch):
    provide(monkeypatch, dict)
    with pytest.raises(ValueError, match=r"'installed' must be a subclass of jkv\.Policy"):
        get_policy("installed")


def test_entry_points_are_looked_up_in_the_group_that_the_readme_names():
    assert registry.ENTRY_POINTS == "jkv.policies"
    assert registry.entry_points is importlib.metadata.entry_points


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="'full' is taken by Full; choose another"):
        register("full")(Installed)
    preset("installed@small", Installed(budget=40), "for small machines")
    assert entry("installed@small").about == "for small machines"
    assert get_policy("installed@small:interval=5") == Installed(budget=40, interval=5)


def test_a_file_dropped_into_the_package_registers_itself(tmp_path):
    for package in ("jkv", "pallas_kernels", "weights"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    text = MINE.replace(
        "import jkv\n", "from jkv.policies.base import Evict\nfrom jkv.policies.registry import register\n"
    )
    text = text.replace("@dataclass(", '@register("mine")\n@dataclass(', 1).replace("jkv.Evict", "Evict")
    (tmp_path / "jkv" / "policies" / "mine.py").write_text(text)
    code = "from jkv.policies import get_policy, names; print('mine' in names(), get_policy('mine:weight=3'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True Mine(")
    assert "weight=3" in done.stdout


def test_importing_policies_starts_no_backend():
    code = (
        "import jkv.policies\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "[jkv.policies.get_policy(name) for name in jkv.policies.names()]\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_defaults_of_a_policy_are_full_attention():
    assert dict(describe(Policy())) == {"interval": 0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().interval = 3  # type: ignore[misc]
