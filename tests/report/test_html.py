import re

import numpy as np
import pytest
import torch

import sparsifiner as sp
from sparsifiner.inspect import compare
from sparsifiner.inspect.statistics import measure
from sparsifiner.report import html


@pytest.fixture
def student(vit, photos):
    student = sp.sparsify(vit, sp.suggest_config(vit, 0.3, pattern="learned", n_down=9))
    sp.calibrate(student, photos)
    return student


def test_report_holds_all_and_asks_for_nothing(student, photos, tmp_path):
    batches = [(photos, torch.arange(6) % 7)]
    rows = compare.compare(student, batches, [compare.RESIDUAL], [0.3])
    pictures = html.pictures_of(student, photos[0], np.full((20, 20, 3), 0.4), "dog & <cat>.jpg")
    path = tmp_path / "report.html"
    html.write_report(
        path,
        student,
        title="<b>mine</b>",
        command="sparsifiner report x",
        rows=rows,
        statistics=measure(student, photos),
        statistics_images=6,
        pictures=pictures,
        log=[{"phase": 2, "step": 10, "loss": 0.25}],
    )
    page = path.read_text()
    assert "&lt;b&gt;mine&lt;/b&gt;" in page
    assert "<b>mine" not in page
    assert "dog &amp; &lt;cat&gt;.jpg" in page
    assert page.count("<figure>") == len(pictures) == 6
    assert page.count("data:image/png;base64,") == 6
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert f"{rows[1].agreement:.2f}" in page
    assert "On 6 images" in page
    assert "sparsifiner report x" in page
    assert torch.__version__ in page
    assert "0.25" in page


def test_a_report_without_images(student, tmp_path):
    html.write_report(tmp_path / "r.html", student, title="t", command="c")
    page = (tmp_path / "r.html").read_text()
    assert "What it costs" not in page
    assert "26 tokens" in page
    assert "landmarks" in page


def test_a_report_of_a_model_made_for_cells(vit, photos, tmp_path):
    student = sp.sparsify(vit, sp.SparseConfig([0.3, 0.3], pattern="cells"))
    statistics = measure(student, photos)
    pictures = html.pictures_of(student, photos[0], np.full((20, 20, 3), 0.4), "photo")
    assert ["the cells it opens" in picture.caption for picture in pictures] == [False, True, False, False, False]
    html.write_report(
        tmp_path / "r.html",
        student,
        title="t",
        command="c",
        statistics=statistics,
        statistics_images=6,
        pictures=pictures,
    )
    page = (tmp_path / "r.html").read_text()
    assert "the means of cells" in page
    assert "of which predictors 0.00 M" in page
    assert "landmarks" not in page
    assert "coefficients" not in page
    # 8 keys are two of the nine cells that 5 x 5 patches make.
    assert page.count("<td>7.0</td>") == 2
