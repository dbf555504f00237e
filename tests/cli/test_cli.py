"""The command as a user meets it: what it prints, what it writes, how it refuses."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import timm
import torch
import typer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

import sparsifiner as sp
from sparsifiner.cli import main
from sparsifiner.cli.main import app
from sparsifiner.errors import ConfigError
from sparsifiner.inspect import tuning

from ..toys import sharpen

NAME = "vit_tiny_patch16_224"
RANDOM = ("--weights", "random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights of a tiny model of three classes, and twelve images of them."""
    root = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    save_file(
        sharpen(timm.create_model(NAME, img_size=64, num_classes=3)).state_dict(),
        root / "weights.safetensors",
    )
    for number, name in enumerate(("ant", "bee", "cat")):
        (root / "images" / name).mkdir(parents=True)
        for index in range(4):
            pixels = torch.randint(
                0,
                255,
                (70, 70, 3),
                dtype=torch.uint8,
                generator=torch.Generator().manual_seed(number * 9 + index),
            )
            Image.fromarray(pixels.numpy()).save(root / "images" / name / f"{index}.png")
    return root


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def calibrate(folder, *more):
    return run(
        "calibrate", "--model", NAME, "--image-size", 64, "--weights", folder / "weights.safetensors",
        "--data", folder / "images", "--images", 8, "--n-down", 4, "--out", folder / "student.safetensors", *more,
    )  # fmt: skip


@pytest.mark.parametrize(("sparse", "dense", "slower"), [(1.0, 2.0, ()), (2.0, 1.0, tuple(range(12)))])
def test_tuning_on_the_command_line(folder, monkeypatch, sparse, dense, slower):
    """Only --tune changes what a model computes; without it, one line says what would be faster."""
    timing = tuning.TuningReport((tuning.LayerTiming({"dense": dense, "per query": sparse}),) * 12, 8, 17, 1)
    monkeypatch.setattr(tuning, "time_layers", lambda *_, **__: timing)
    line = "dense attention is as fast or faster here in 12 of 12 layers (17 tokens, batch 8, 1 thread)"
    path = folder / "student.safetensors"
    said = calibrate(folder).stderr
    assert (line in said) == bool(slower)
    assert sp.config_of(sp.load(path)).dense == ()
    said = run("eval", path, "--data", folder / "images").stderr
    assert (line in said) == bool(slower)
    result = calibrate(folder, "--tune")
    assert line not in result.stderr
    table = "layer  dense ms  per query ms  taken"
    assert table in result.stdout
    assert sp.config_of(sp.load(path)).dense == slower
    said = run("info", path).stdout
    assert f"  dense: {list(slower)}" in said
    assert table in said
    assert f"    0     {dense:.3f}         {sparse:.3f}  {'dense' if slower else 'per query'}" in said
    assert line not in run("eval", path, "--data", folder / "images").stderr


def test_calibrate_then_eval_info_and_flops(folder):
    report = json.loads(calibrate(folder, "--keep", "0.4", "--tau", "0.1", "--json").stdout)
    assert report["images"] == 8
    assert len(report["layers"]) == 12
    path = folder / "student.safetensors"
    assert sp.config_of(sp.load(path)) == sp.SparseConfig(0.4, n_down=4, tau=0.1, basis_threshold=2 / 17)

    evaluated = json.loads(run("eval", path, "--data", folder / "images", "--keep", "0.3", "--json").stdout)
    dense, sparse = evaluated["rows"]
    assert evaluated["config"]["keep"] == 0.3
    assert dense["images"] == sparse["images"] == 12
    assert dense["agreement"] == 100
    assert sparse["kept_share"] < 1
    assert (dense["keep"], sparse["keep"]) == (None, 0.3)
    by_layer = ",".join(["0.5", "0.25"] * 6)
    arguments = ("eval", path, "--data", folder / "images", "--keep", by_layer)
    assert json.loads(run(*arguments, "--json").stdout)["rows"][1]["keep"] == [0.5, 0.25] * 6
    assert "mean 0.375" in run(*arguments).stdout
    linformer = json.loads(run("eval", path, "--data", folder / "images", "--pattern", "linformer", "--json").stdout)
    assert linformer["rows"][1]["keep"] is None  # it keeps no keys
    assert "top-1 %" in run("eval", path, "--data", folder / "images", "--no-residual", "--tile", "2x2").stdout

    about = json.loads(run("info", path, "--json").stdout)
    assert about["model"]["architecture"] == NAME

    paper, measured = json.loads(run("flops", path, "--data", folder / "images", "--json").stdout)
    assert paper["convention"] == "paper"
    assert measured["convention"] == "measured"
    assert measured["residual"] > 0
    assert "dense total" in run("flops", path).stdout


def test_sweep_tables_figures_and_report(folder, tmp_path):
    calibrate(folder, "--keep", "0.4")
    path, images = folder / "student.safetensors", folder / "images"
    arguments = ("sweep", path, "--data", images, "--keeps", "0.4,0.2", "--token-keeps", "1,0.5")
    more = ("--search-data", images, "--search-limit", 4, "--out", tmp_path / "sweep")
    found = json.loads(run(*arguments, *more, "--json").stdout)
    assert len(found["points"]) == 8
    assert {point["token_keep"] for point in found["points"]} == {1.0, 0.5}
    by_layer = [point for point in found["points"] if point["layers"]]
    assert len(by_layer) == 4
    for point in by_layer:
        keeps = [float(keep) for keep in point["layers"].split()]
        assert len(keeps) == 12
        assert sum(keeps) / 12 <= point["keep"] + 1e-9
    assert any(point["best"] for point in found["points"])
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 9
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 10_000
    assert "evit 0.5" in run(*arguments).stdout

    run("tables", path, "--data", images, "--limit", 6, "--out", tmp_path / "tables")
    assert "6 images" in (tmp_path / "tables" / "tables.md").read_text()
    noted = (tmp_path / "tables" / "measured.jsonl").read_text()
    more = ("--preprocess", "model,crop", "--out", tmp_path / "tables", "--json")
    own = shutil.copy(path, tmp_path / "own.safetensors")
    table = json.loads(run("tables", path, own, "--data", images, "--limit", 6, *more).stdout)
    assert {row.get("measured_with") for row in table} == {None, folder.name, "own"}
    after = (tmp_path / "tables" / "measured.jsonl").read_text()
    assert after.startswith(noted)  # the first is not measured again
    assert len(after.splitlines()) > len(noted.splitlines())
    nothing = CliRunner().invoke(app, ["tables", str(path), "none.safetensors", "--data", str(images), "--out", "late"])
    assert "none.safetensors does not exist" in str(nothing.exception)
    assert "dense" not in nothing.stderr  # before the first is measured
    rows = json.loads(run("tables", "--json").stdout)
    assert len(rows) == 35

    photo = images / "ant" / "0.png"
    drawn = run("figures", path, "--image", photo, "--out", tmp_path / "figures", "--layers", "1,9", "--query", "1,2")
    assert "connections.pdf" in drawn.stdout
    assert len(list((tmp_path / "figures").iterdir())) == 14
    more = ("--data", images, "--keeps", "0.4,0.2", "--only", "trade-off")
    assert "trade-off.png" in run("figures", path, "--image", photo, "--out", tmp_path / "figures", *more).stdout

    run("report", path, "--data", images, "--keeps", "0.2", "--image", photo, "--out", tmp_path / "report.html")
    assert "On 12 images" in (tmp_path / "report.html").read_text()

    evaluated = ("eval", path, "--data", images, "--json")
    row = json.loads(run(*evaluated, "--token-keep", "0.5", "--token-fuse").stdout)
    assert row["config"]["tokens"] == {"keep": 0.5, "method": "evit", "blocks": None, "fuse": True}
    row = json.loads(run(*evaluated, "--token-keep", "0.5", "--token-fuse-official").stdout)
    assert row["config"]["tokens"]["fuse"] == "official"
    assert json.loads(run(*evaluated, "--pattern", "window").stdout)["config"]["pattern"] == "window"


def test_calibrate_prints_recall_and_writes_predictors_only(folder):
    text = calibrate(folder, "--predictors-only").stdout
    assert "recall" in text
    assert "calibrated on 8 images" in text
    assert (folder / "student.safetensors").stat().st_size < (folder / "weights.safetensors").stat().st_size / 10


@pytest.fixture(scope="module")
def opening(folder):
    """A checkpoint that opens cells, made in one command."""
    arguments = ["--model", NAME, "--weights", folder / "weights.safetensors", "--image-size", 64, "--keep", 0.4]
    result = run("convert", *arguments, "--cells", "2x2,4x4", "--breadth", 2.5, "--out", folder / "cells.safetensors")
    assert "keep 0.4: cells of 2 x 2, 4 x 4 patches, breadth 2.5; each query opens its own" in result.stdout
    return folder / "cells.safetensors"


def test_convert_then_everything_else(folder, opening, tmp_path):
    data = ("--data", folder / "images")
    with safe_open(opening, "pt") as file:
        assert not any("predictor" in name for name in file.keys())  # noqa: SIM118
    content = json.loads(run("eval", opening, *data, "--tile", "2x2", "--keep", 0.5, "--json").stdout)
    assert (content["config"]["pattern"], content["config"]["cells"]) == ("cells", [[2, 2], [4, 4]])
    assert content["rows"][1]["images"] == 12
    counts = json.loads(run("flops", opening, *data, "--json").stdout)
    assert all(count["mhsa"] > 0 for count in counts)
    assert json.loads(run("info", opening, "--json").stdout)["config"]["breadth"] == 2.5
    rows = json.loads(
        run("bench", "--checkpoint", opening, "--keep", 0.5, "--tile", "none", "--seconds", 0.01, "--json").stdout
    )
    assert [row["name"] for row in rows] == ["model, dense", "model, cells, keep 0.5"]
    assert rows[1]["residual"]
    more = ("--tiles", "none,2x2", "--levels", "2x2;1x1,2x2", "--out", tmp_path / "sweep")
    swept = json.loads(run("sweep", opening, *data, "--keeps", "0.5", *more, "--json").stdout)
    shapes = ["per query, cells 2x2", "per query, cells 1x1 2x2", "tile 2x2, cells 2x2", "tile 2x2, cells 1x1 2x2"]
    assert [point["shape"] for point in swept["points"]] == shapes
    assert (tmp_path / "sweep" / "sweep.png").exists()
    run("report", opening, *data, "--limit", 4, "--out", tmp_path / "report.html")
    assert "the means of cells" in (tmp_path / "report.html").read_text()
    photo = next((folder / "images" / "ant").iterdir())
    drawn = run("figures", opening, "--image", photo, "--out", tmp_path / "figures", "--only", "recall").stdout
    assert "recall.png" in drawn


def test_convert_can_be_tuned(folder, monkeypatch, tmp_path):
    slow = tuning.LayerTiming({"dense": 1.0, "per query": 2.0})
    monkeypatch.setattr(tuning, "_time", lambda *arguments: slow)
    arguments = ["--model", NAME, "--weights", folder / "weights.safetensors", "--image-size", 64, "--batch-size", 2]
    result = run("convert", *arguments, "--tune", "--out", tmp_path / "a.safetensors", "--json")
    about = json.loads(result.stdout)
    assert about["timing"]["images"] == 2
    assert (
        sp.config_of(sp.load(tmp_path / "a.safetensors")).dense == tuple(range(12)) == tuple(about["config"]["dense"])
    )


def test_train_goes_on_with_cells(folder, opening, tmp_path):
    quick = ("--phase2-epochs", 1, "--batch-size", 4, "--mixup", 0, "--cutmix", 0, "--auto-augment", "", "--erase", 0)
    result = run("train", "--checkpoint", opening, "--data", folder / "images", "--out", tmp_path, "--json", *quick)
    assert json.loads(result.stdout)["steps"] == {"2": 3}
    assert sp.config_of(sp.load(tmp_path)).cells == ((2, 2), (4, 4))
    with pytest.raises(ConfigError, match="freeze_host leaves nothing to learn"):
        run(
            "train",
            "--checkpoint",
            opening,
            "--data",
            folder / "images",
            "--out",
            tmp_path / "b",
            "--freeze-host",
            *quick,
        )


def test_train_without_labels(folder, opening, tmp_path):
    """Photos in one folder, of no class."""
    loose = tmp_path / "photos"
    loose.mkdir()
    for number, photo in enumerate(sorted((folder / "images").rglob("*.*"))[:4]):
        (loose / f"{number}{photo.suffix}").write_bytes(photo.read_bytes())
    arguments = ("train", "--checkpoint", opening, "--data", loose, "--recipe", "large-cells", "--phase2-epochs", 1)
    arguments += ("--keep", 0.5)
    about = json.loads(run(*arguments, "--no-labels", "--out", tmp_path / "run", "--json").stdout)
    assert about["steps"] == {"2": 1}
    assert "label" not in about["last"]
    assert {"token", "prediction"} <= set(about["last"])
    with pytest.raises(ConfigError, match="contradict each other"):
        run(*arguments, "--no-labels", "--label-weight", 1, "--out", tmp_path / "run")


def test_flops_of_a_named_model():
    (count,) = json.loads(run("flops", "--model", "deit_small_patch16_224", "--keep", "0.25", "--json").stdout)
    assert count["dense_attention"] == pytest.approx(357.7e6, rel=1e-3)
    assert count["mhsa"] == pytest.approx(165.6e6, rel=2e-2)


def test_the_papers_rows():
    rows = json.loads(run("flops", "--paper", "--json").stdout)
    assert len(rows) == 28
    assert sorted(abs(row["difference"]) for row in rows)[-2] < 0.06  # one row does not fit the others' density
    assert "LV-ViT-S" in run("flops", "--paper").stdout


def test_info_names_versions_hosts_and_backends():
    about = json.loads(run("info", "--json").stdout)
    assert about["sparsifiner"] == sp.__version__
    assert about["backends"]["eager"] == "can run"
    assert "timm" in about["hosts"]
    assert "backends:" in run("info").stdout


def test_info_shows_what_a_file_says_without_doing_it(folder, tmp_path):
    calibrate(folder)
    with safe_open(folder / "student.safetensors", "pt") as file:
        about = json.loads(file.metadata()["sparsifiner"]) | {"library_version": "\x1b[2J\ud800"}
    about["model"]["architecture"] = "\x1b[2J"
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", {"sparsifiner": json.dumps(about)})
    shown = run("info", tmp_path / "a.safetensors").stdout
    assert "library_version: \\x1b[2J\\ud800" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert json.loads(run("info", tmp_path / "a.safetensors", "--json").stdout)["library_version"] == "\x1b[2J\ud800"


def test_demo_on_a_real_model(folder, tmp_path):
    result = run(
        "demo", "--model", NAME, "--weights", folder / "weights.safetensors", "--data", folder / "images",
        "--calibration-data", folder / "images", "--keep", "0.5,0.1", "--n-down", 4, "--images", 6, "--limit", 9,
        "--image-size", 64, "--report", tmp_path / "report.html", "--json",
    )  # fmt: skip
    assert "On 9 images" in (tmp_path / "report.html").read_text()
    rows = json.loads(result.stdout)
    forms = ("cells", "paper form", "residual", "residual + tile 2x2")
    assert [row["form"] for row in rows] == ["dense", *(form for form in forms for _ in range(2))]
    assert {row["images"] for row in rows} == {9}


@pytest.fixture
def small_demo(monkeypatch, tmp_path):
    """Scenes of few patches, hardly trained on."""
    from sparsifiner import scenes
    from sparsifiner.cli import demo

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for module, changes in (
        (scenes, {"STEPS": 2, "TOKENS": 128, "MIXTURE": (8,)}),
        (demo, {"CANVASES": {8: 2, 16: 2}, "SIDE": 16, "BATCH": 2, "SECONDS": 0.01}),
    ):
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)


def test_demo_on_scenes(small_demo, tmp_path):
    text = run("demo", "--images", 2).stdout
    assert "faster at equal accuracy" in text.splitlines()[0].lower()
    assert "Every form at 257 tokens" in text
    for form in ("cells", "paper form", "residual + tile 2x2", "fixed window"):
        assert form in text
    page = (tmp_path / "demo-report.html").read_text()
    assert "<h2>What is gained</h2>" in page
    assert page.count("<figure>") == 3
    found = json.loads(run("demo", "--images", 2, "--json").stdout)  # with the model that was kept
    assert [gain["tokens"] for gain in found["gains"]] == [65, 257]
    assert "as fast as dense at 257 tokens" in found["summary"]
    assert found["forms"][0]["form"] == "dense"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "nothing.safetensors"], "nothing.safetensors does not exist"),
        (["eval", "nothing.safetensors", "--data", "x"], "nothing.safetensors does not exist"),
        (["flops"], "no model: give --model NAME"),
        (["flops", "--model", "deit_tinny_patch16_224"], "did you mean deit_tiny_patch16_224"),
        (["flops", "--model", "resnet18"], "none of its modules is called attention"),
        (["flops", "--model", NAME, "--keep", "1.5"], "keep must be a share of the tokens in (0, 1]"),
        (["flops", "--model", NAME, "--keep", "half"], "--keep: expected numbers between commas, got 'half'"),
        (["flops", "--model", NAME, "--keep", "0.5,0.5"], "keep lists 2 values but the model has 12"),
        (["flops", "--model", NAME, "--n-down", "500"], "n_down=500 is more landmarks than the 14 x 14 grid"),
        (["demo", "--model", NAME], "needs --data to evaluate on and other --calibration-data"),
        (["demo", "--tile", "2by2"], "--tile: expected ROWSxCOLUMNS, such as 2x7"),
        (["calibrate", "--model", NAME, *RANDOM, "--data", "nowhere", "--out", "x"], "nowhere does not exist"),
        (
            ["calibrate", "--model", NAME, "--data", "x", "--out", "y"],
            "without --weights: give a file of weights, 'hub'",
        ),
        (["train", "--model", NAME, "--data", "x", "--out", "y"], "or 'random' if that is meant"),
        (["demo", "--model", NAME, "--data", "x", "--calibration-data", "y"], f"--model {NAME} without --weights"),
        (["figures", "x", "--image", "x.png", "--model", NAME], f"--model {NAME} without --weights"),
        (["report", "x", "--model", NAME], f"--model {NAME} without --weights"),
        (["train", "--data", "x", "--out", "y", "--recipe", "nope"], "no recipe 'nope': give a TOML file, or one of"),
        (["train", "--data", "x", "--out", "y", "--elastic", "1"], "elastic: expected LOW:HIGH"),
        (["train", "--data", "x", "--out", "y", "--keep", "2"], "keep must be at least 0 and at most 1"),
        (["train", "--data", "x", "--out", "y", "--cache-teacher"], "images that are the same in every epoch"),
        (["train", "--data", "nowhere", "--out", "y", "--model", NAME, *RANDOM], "nowhere does not exist"),
        (["train", "--data", "x", "--out", "y", "--token-keep", "0"], "the tokens' keep must be a share"),
        (
            ["convert", "--model", NAME, *RANDOM, "--out", "x", "--cells", "2by2"],
            "--cells: expected ROWSxCOLUMNS of each",
        ),
        (["convert", "--model", NAME, *RANDOM, "--out", "x", "--cells", "2x2,3x3"], "do not hold whole cells of 2 x 2"),
        (["convert", "--model", NAME, *RANDOM, "--out", "x", "--cells", "15x1"], "larger than the grid of 14 x 14"),
        (
            ["convert", "--model", NAME, *RANDOM, "--out", "x", "--breadth", "0"],
            "breadth must be a number of at least 1",
        ),
        (
            ["convert", "--model", NAME, *RANDOM, "--out", "x", "--keep", "0.01", "--cells", "2x2"],
            "2 keys is less than one cell of 2 x 2",
        ),
        (["convert", "--model", NAME, "--out", "x"], f"--model {NAME} without --weights"),
        (
            ["calibrate", "--model", NAME, *RANDOM, "--data", "x", "--out", "y", "--pattern", "cells"],
            "there is nothing to calibrate, `sparsifiner convert` writes the checkpoint without images",
        ),
        (["train", "--data", "x", "--out", "y", "--cells", "2"], "cells: expected ROWSxCOLUMNS of each level"),
        (["bench", "--pattern", "cells"], "--pattern is of a whole model: give --model or --checkpoint"),
        (["tables", "nothing.safetensors"], "give both checkpoints and --data"),
        (["sweep", "nothing.safetensors", "--data", "x", "--cost", "money"], "--cost must be total_macs"),
        (["sweep", "nothing.safetensors", "--data", "x"], "nothing.safetensors does not exist"),
        (["figures", "nothing.safetensors", "--image", "x.png"], "nothing.safetensors does not exist"),
        (["figures", "nothing.safetensors", "--image", "x.png", "--only", "trade-off"], "labelled images with --data"),
        (["report", "nothing.safetensors"], "nothing.safetensors does not exist"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sparsifiner", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_the_command_itself(tmp_path):
    command = [sys.executable, "-m", "sparsifiner", "info", "nothing.safetensors"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: nothing.safetensors does not exist or is not a file\n"


def test_ctrl_c_ends_quietly(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupt)
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == 130
    assert "stopped" in capsys.readouterr().err


def test_broken_images_are_named_and_skipped_if_asked(folder, tmp_path):
    import shutil

    images = shutil.copytree(folder / "images", tmp_path / "images")
    (images / "bee" / "0.png").write_bytes(b"broken")
    arguments = ["calibrate", "--model", NAME, *RANDOM, "--image-size", 64, "--data", images, "--n-down", 4]
    arguments += ["--out", tmp_path / "s"]
    with pytest.raises(sp.SparsifinerError, match="cannot read image bee/0.png.*on the command line --skip-unreadable"):
        run(*arguments)
    assert not (tmp_path / "s").exists()
    result = run(*arguments, "--skip-unreadable")
    assert "skipped bee/0.png" in result.stderr
    assert "skipped 1 of 12 images" in result.stderr
    assert f"{images} holds 12 images, fewer than the 256 wanted: all are used" in result.stderr
    assert "wanted" not in run(*arguments, "--skip-unreadable", "--images", 12).stderr


def test_every_verb_that_reads_images_can_skip():
    """The message of a broken one names the option, whatever the verb."""
    for command in typer.main.get_command(app).commands.values():
        names = {name for parameter in command.params for name in parameter.opts}
        assert ("--skip-unreadable" in names) == ("--data" in names), command.name


def test_random_weights_are_said_where_they_need_not_be_asked_for(folder):
    counted = run("flops", "--model", NAME, "--image-size", 64, "--n-down", 4, "--data", folder / "images")
    assert f"{NAME} has random weights here" in counted.stderr
    assert "random" not in run("flops", "--model", NAME).stderr  # no weight is looked at
    timed = run("bench", "--model", NAME, "--image-size", 64, "--keep", 0.5, "--tile", "none", "--seconds", 0.01)
    assert f"{NAME} has random weights here" in timed.stderr


@pytest.mark.parametrize("verb", [command.name for command in app.registered_commands])
def test_help_has_an_example(verb):
    assert "Example" in run(verb, "--help").stdout


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("verb", [command.name for command in app.registered_commands])
def test_help_shows_every_option_whole(verb, columns):
    text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": str(columns)}).stdout
    assert max(map(len, text.splitlines())) <= columns
    command = typer.main.get_command(app).commands[verb]
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {name for name in names if name.startswith("-")} <= set(re.split(r"[\s│,/]+", text))


def test_version():
    assert run("--version").stdout.strip() == f"sparsifiner {sp.__version__}"


def test_help_does_not_wait_for_torch():
    """Not a time, which a busy machine would spoil: what is imported decides it."""
    code = (
        "import sys; from sparsifiner.cli.main import app; from typer.testing import CliRunner;"
        "CliRunner().invoke(app, ['--help']); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_train_goes_on_where_it_was(folder):
    arguments = [
        "train", "--model", NAME, "--image-size", 64, "--weights", folder / "weights.safetensors",
        "--data", folder / "images", "--out", folder / "run", "--recipe", "digits", "--keep", 0.3, "--n-down", 4,
        "--batch-size", 2, "--phase1-epochs", 1, "--phase2-epochs", 1, "--calibration-images", 4,
    ]  # fmt: skip
    first = json.loads(run(*arguments, "--json").stdout)
    assert first["resumed"] is None
    assert first["steps"] == {"1": 6, "2": 6}
    assert "went on from" in run(*arguments).stdout
    assert (folder / "run" / "curves.png").exists()
    assert "sparse" in run("eval", folder / "run" / "student.safetensors", "--data", folder / "images").stdout
    with pytest.raises(sp.SparsifinerError, match="phase2_learning_rate"):
        run(*arguments, "--phase2-learning-rate", 1e-4)


def test_a_run_that_was_asked_to_stop_says_so(monkeypatch, capsys):
    from sparsifiner.distillation.loop import TrainingInterrupted

    def stop():
        raise TrainingInterrupted("stopped after step 3 of phase 1: saved as run/step-1-000003", 15)

    monkeypatch.setattr(main, "app", stop)
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == 143
    assert capsys.readouterr().err == "stopped after step 3 of phase 1: saved as run/step-1-000003\n"
