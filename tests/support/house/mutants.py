"""Configs that nobody meant: the examples with other types, depths, lengths,
characters, numbers, keys and encodings."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from replicas.errors import BadConfig
from tests.support.root import ROOT

__all__ = ["EXAMPLES", "assert_told_well", "mutant"]

EXAMPLES = sorted((ROOT / "examples").glob("*/*.toml"))
_ASSIGNMENT = re.compile(r"^(?P<key>[^=\n#\[]+)=(?P<value>.*)$", re.MULTILINE)
_PROGRAM = re.compile(r'"(\w+\.py)"')
_VALUES = [
    "0", "-1", "1", "-0", "1_000", "0x7fffffffffffffff", "0b1", "100000000", "9" * 400, "9" * 5000, "0x" + "f" * 5000,
    "0.0", "-1.5", "1e400", "nan", "-inf", "true", "1979-05-27T07:32:00Z", "07:32:00", '""', '"x"', '"0"', '"nan"',
    '"1e9s"', '"10m"', '"99999999999999d"', '"9999999TiB"', '"' + "9" * 400 + 's"', '"' + "9" * 5000 + 'GiB"',
    '"127.0.0.1:' + "9" * 5000 + '"', '"0.0.0.0:0"', '"[::1]:65536"', '"\\u0000"', '"\\u001b]0;t\\u0007"', '"\\u202e"',
    '"~nobody-of-this-name/x"', '"/proc/self/mem"', '"/dev/full"', '"' + "/a" * 3000 + '"', '"' + "x" * 50_000 + '"',
    "[]", "[[]]", "[1, 'a', {}]", '["a", "a"]', '["a:ready:finished"]', '[""]', "['" + "a', '" * 5000 + "']",
    "{}", "{ a = 1 }", '{ "" = "" }', "{ a.b.c = [] }", '"""\nmore\nlines"""', "[\n1,\n2\n]",
]  # fmt: skip
_KEYS = [
    '""',
    '"\\u0000"',
    '"\\u001b[2J"',
    '"é漢"',
    "a" * 5000,
    "a.b.c",
    '"a.b"',
    "replicas",
    "command",
    "name",
    "n\u0430me",
]


def _value(draw: random.Random, text: str) -> str:
    places = list(_ASSIGNMENT.finditer(text))
    place = draw.choice(places) if places else None
    if place is None:
        return text
    value = draw.choice(_VALUES)
    if draw.random() < 0.25:
        depth = draw.choice((1, 2, 31, 33, 300, 3000))
        opening, closing = draw.choice((("[", "]"), ("{ a = ", " }")))
        value = opening * depth + value + closing * depth
    return text[: place.start("value")] + " " + value + text[place.end("value") :]


def _key(draw: random.Random, text: str) -> str:
    places = list(_ASSIGNMENT.finditer(text))
    if not places:
        return text
    place = draw.choice(places)
    key = draw.choice([*_KEYS, ".".join(["a"] * draw.choice((30, 40, 400, 800)))])
    return text[: place.start("key")] + key + " " + text[place.end("key") :]


def _lines(draw: random.Random, text: str) -> str:
    lines = text.split("\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[one]
        case 1:
            lines.insert(other, lines[one])
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case _:
            lines[one] = lines[one][: draw.randrange(len(lines[one]) + 1)]
    return "\n".join(lines)


def _characters(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(list("\0\x1b\x7f\x9b\u202e\u2028\"\\'[]{}=.,#\r\n é漢\U0001f680")) + text[at:]


def _many(draw: random.Random, text: str) -> str:
    count = draw.choice((10, 300, 3000))
    each = draw.choice(
        (
            "k{0} = {0}\n",
            '[groups.g{0}]\ncommand = ["-m", "x"]\n',
            '[channels.c{0}]\nsources = ["g{0}"]\n',
            f"[a{{0}}{'.a' * draw.choice((30, 40))}]\n",
            f"# {'x' * 500} {{0}}\n",
            "[[groups]]\n",
        )
    )
    return f"{text}\n{''.join(each.format(number) for number in range(count))}"


def _chain(draw: random.Random, text: str) -> str:
    """Groups that wait for each other, all with a share of the machine."""
    count = draw.choice((2, 24, 200))
    groups = "".join(
        f'[groups.w{at}]\ncommand = ["-m", "x"]\ndepends_on = ["w{draw.choice((at + 1, (at * 7 + 1) % count))}:finished"]\n'
        f"resources = {{ cpu_threads = 1, gpus = {draw.randrange(2)} }}\n"
        for at in range(count)
    )
    return f'{text}\n{groups}[groups.w{count}]\ncommand = ["-m", "x"]\n'


_MUTATIONS: list[Callable[[random.Random, str], str]] = [
    _value,
    _value,
    _value,
    _key,
    _lines,
    _characters,
    _many,
    _chain,
]


def _encoded(draw: random.Random, text: str) -> bytes:
    match draw.randrange(16):
        case 0:
            return text.encode("utf-16", "surrogatepass")
        case 1:
            return text.encode("latin-1", "replace")
        case 2:
            return b"\xef\xbb\xbf" + text.encode()
        case 3:
            return text.replace("\n", draw.choice(("\r\n", "\r", "\n\r"))).encode()
        case 4:
            data = bytearray(text.encode())
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            return bytes(data)
        case 5:
            return text.encode()[: draw.randrange(len(text))]
    return text.encode()


def mutant(seed: int) -> bytes:
    """The config of that number: the same in every run."""
    draw = random.Random(seed)
    example = draw.choice(EXAMPLES)
    text = _PROGRAM.sub(rf'"{example.parent}/\1"', example.read_text())
    for _ in range(draw.choice((1, 1, 2, 3))):
        text = draw.choice(_MUTATIONS)(draw, text)
    return _encoded(draw, text)


_NAMED = re.compile(
    r"line \d+( \(.+\))?: |is not valid TOML: .*\(at (line \d+, column \d+|end of document)\)$"
    r"|is not UTF-8 text: .* at byte \d+$|is larger than [\d,]+ bytes|and [\d,]+ more problems$"
    r'|(?:[\w-]+|"[^"]*")(?:\.(?:[\w-]+|"(?:[^"\\]|\\.)*"))*: '  # a table or key that is missing
)


def assert_told_well(error: BadConfig) -> None:
    """Each problem is one line that can be shown, not endless, and names a line, a key
    or the file's own trouble."""
    assert error.problems
    for problem in error.problems:
        assert problem.isprintable(), problem
        assert len(problem) < 3000, problem
        assert _NAMED.match(problem), problem
    assert len(error.problems) <= 101
