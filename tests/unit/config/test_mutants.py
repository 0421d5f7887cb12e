"""Configs that nobody meant are refused with words, or fit; the first of those of
tests/integration/config/test_mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas.config import file as config_file
from replicas.errors import BadConfig
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.plans import notes, problems
from tests.support.house.mutants import assert_told_well, mutant

HERE = Machine(gpus=("0", "1"), cpus=4, memory_nbytes=1 << 34)
COUNT = 100


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_mutant_is_refused_with_words_or_fits(part: int, tmp_path: Path) -> None:
    path, refused = tmp_path / "run.toml", 0
    for seed in range(part, COUNT, 4):
        path.write_bytes(mutant(seed))
        try:
            config = config_file.load(path)
        except BadConfig as error:
            assert_told_well(error)
            refused += 1
        else:
            assert all(one.isprintable() for one in (*problems(config, HERE), *notes(config, HERE)))
    assert refused > COUNT // 8  # most of them mean nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("env = " + "[" * 5000 + "]" * 5000, "line 7 (env): tables or lists are nested more than 32 deep"),
        (".".join(["a"] * 3000) + " = 1", f"line 7 ({'a.' * 20}…): tables or lists are nested more than 32 deep"),
        ("replicas = " + "9" * 5000, "line 7 (replicas): Exceeds the limit (4300 digits) for integer string conversion: "),
        ("stop_timeout = " + "9" * 400, "line 7: groups.a.stop_timeout: expected a duration of at most 1e+09 seconds, "),
        ('resources.memory = 0x1' + "0" * 400, "line 7: groups.a.resources.memory: expected a size of at most "),
        ("replicas = 100000000", "line 7: groups.a.replicas: expected at most 100,000, got 100000000"),
        ("replicas = 100000\nnproc_per_node = 100", "line 4: groups: ask for 10,000,000 ranks in all, above the limit of "),
        ('[control]\nlisten = "127.0.0.1:' + "9" * 5000 + '"', 'line 8: control.listen: expected "host:port" such as '),
        ("a = 1\n" * 2, "is not valid TOML: Cannot overwrite a value (at line 8, "),
        ("\n".join(f"k{number} = 1" for number in range(3000)), "line 7: groups.a.k0: unknown key; known: "),
        ("env = { A = [\n1,\n2] }\n\n# words\ncwd = 3", "line 7: groups.a.env.A: expected a string"),
    ],
)  # fmt: skip
def test_what_was_a_bug_is_a_problem_with_its_line(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'schema_version = 1\n[run]\nname = "x"\n[groups.a]\nlauncher = "exec"\ncommand = ["true"]\n{line}\n'
    )
    with pytest.raises(BadConfig) as caught:
        config_file.load(path)
    assert_told_well(caught.value)
    assert caught.value.problems[0].startswith(told)


def test_what_never_ends_is_no_config() -> None:
    with pytest.raises(BadConfig, match="is larger than 1,048,576 bytes"):
        config_file.load("/dev/zero")


def test_a_mapping_in_itself_is_no_config() -> None:
    mapping: dict[str, object] = {"schema_version": 1}
    mapping["run"] = mapping
    with pytest.raises(BadConfig, match="more than 32 deep"):
        config_file.parse(mapping)
