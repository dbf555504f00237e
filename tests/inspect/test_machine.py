"""A machine has a name, wherever its system keeps what it says of itself."""

import json

import pytest

from sparsifiner.errors import ConfigError
from sparsifiner.inspect import machine

X86 = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: {model}
model name\t: {name}
stepping\t: 1
flags\t\t: fpu sse4_2 avx avx2 fma {flags}

processor\t: 1
vendor_id\t: GenuineIntel
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd asimdhp {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: {part}
CPU revision\t: 1
"""


def amd(family, model, flags="", name="AMD EPYC"):
    return X86.format(vendor="AuthenticAMD", family=family, model=model, flags=flags, name=name)


@pytest.fixture
def says(monkeypatch, tmp_path):
    """Puts a text where Linux describes its processors; None for a system that does not."""

    def say(text):
        path = tmp_path / "cpuinfo"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(machine, "CPUINFO", path)
        monkeypatch.delenv(machine.VARIABLE, raising=False)

    return say


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (amd(25, 1), "zen3-avx2"),
        (amd(25, 17, "avx512f"), "zen4-avx512"),
        (amd(25, 160, "avx512f avx512_bf16"), "zen4-avx512bf16"),
        (amd(26, 2, "avx512f avx512_bf16"), "zen5-avx512bf16"),
        (amd(99, 1, name="AMD EPYC 9999 96-Core Processor"), "amd-epyc-9999-avx2"),
        (
            X86.format(vendor="GenuineIntel", family=6, model=143, flags="avx512f avx512_bf16 amx_bf16", name="Xeon"),
            "sapphirerapids-avx512bf16",
        ),
        (
            X86.format(vendor="GenuineIntel", family=6, model=1, flags="", name="Intel(R) Xeon(R) CPU E5 @ 2.20GHz"),
            "intel-xeon-e5-avx2",
        ),
        (ARM.format(part="0xd0c", features="asimddp"), "neoverse-n1-neon"),
        (ARM.format(part="0xd40", features="sve bf16"), "neoverse-v1-sve"),
    ],
)
def test_names(says, text, name):
    says(text)
    assert machine.machine_name() == name
    about = machine.machine()
    assert about["name"] == name
    assert json.loads(json.dumps(about)) == about
    assert set(about["flags"]) <= set(text.split())


@pytest.mark.parametrize("text", [None, "", "nonsense\n:\n\n::"])
def test_systems_that_say_nothing(says, monkeypatch, tmp_path, text):
    says(text)
    monkeypatch.setattr(machine, "CACHES", tmp_path / "none")
    monkeypatch.setattr("os.sysconf", lambda _: (_ for _ in ()).throw(ValueError("unknown")))
    assert machine.machine_name()
    about = machine.machine()
    assert about["torch"]
    assert not {"caches", "memory_gib", "flags", "vendor"} & set(about)
    assert machine.environment()["cores"]


def test_a_name_can_be_given(says, monkeypatch):
    says(amd(25, 1))
    monkeypatch.setenv(machine.VARIABLE, "rack-7.a")
    assert machine.machine_name() == machine.machine()["name"] == "rack-7.a"
    for nonsense in ("", "../up", "a b", ".hidden", "x" * 65):
        monkeypatch.setenv(machine.VARIABLE, nonsense)
        with pytest.raises(ConfigError, match="SPARSIFINER_MACHINE must be letters, digits"):
            machine.machine_name()


def test_caches(says, monkeypatch, tmp_path):
    says(amd(26, 2))
    for index, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1M")]):
        (tmp_path / f"index{index}").mkdir()
        for name, value in {"level": level, "type": kind, "size": size}.items():
            (tmp_path / f"index{index}" / name).write_text(f"{value}\n")
    (tmp_path / "index3").mkdir()  # and one that tells nothing
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine.machine()["caches"] == {"L1d": "48K", "L1i": "32K", "L2": "1M"}
