"""What a sample submission tells about the metric."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.datasets.base import CompetitionType
from penstock.datasets.inference import infer
from penstock.datasets.tabular import TabularDataset

COMMENTS = "id,text,toxic,rude\n" + "".join(f"{n},comment {n},{n % 2},{n % 3 // 2}\n" for n in range(60))


def multilabel(directory: Path, sample: str, train: str = COMMENTS) -> Path:
    directory.mkdir()
    (directory / "train.csv").write_text(train)
    (directory / "test.csv").write_text("id,text\n100,a\n101,b\n")
    (directory / "sample_submission.csv").write_text(sample)
    return directory


def test_halves_in_a_sample_of_labels_are_probabilities(tmp_path: Path) -> None:
    halves = infer(multilabel(tmp_path / "a", "id,toxic,rude\n100,0.5,0.5\n101,0.5,0.5\n"))
    assert halves.spec.competition_type is CompetitionType.MULTILABEL_CLASSIFICATION
    assert halves.metadata.evaluation_metric == "auc"
    dataset = TabularDataset(halves.spec)
    dataset.metric = halves.metadata.evaluation_metric
    assert dataset.score(np.full((60, 2), 0.5)) == 0.5
    test = TabularDataset(halves.spec, "test")
    test.metric = halves.metadata.evaluation_metric
    test.submission(np.array([[0.25, 0.5], [0.75, 1]]), tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text() == "id,toxic,rude\n100,0.25,0.5\n101,0.75,1.0\n"
    zeros = infer(multilabel(tmp_path / "b", "id,toxic,rude\n100,0.0,0.0\n101,0.0,0.0\n"))
    assert zeros.metadata.evaluation_metric == "auc"
    whole = infer(multilabel(tmp_path / "c", "id,toxic,rude\n100,0,1\n101,1,0\n"))
    assert whole.metadata.evaluation_metric == "f1_micro"


def test_a_label_that_never_varies_has_no_auc(tmp_path: Path) -> None:
    train = "id,text,toxic,rude\n" + "".join(f"{n},comment {n},{n % 2},0\n" for n in range(60))
    found = infer(multilabel(tmp_path / "a", "id,toxic,rude\n100,0.5,0.5\n101,0.5,0.5\n", train))
    assert found.metadata.evaluation_metric == "log_loss"
    assert "'rude'" in found.notes["evaluation_metric"]


def test_a_column_for_each_of_two_classes_asks_for_probabilities(tmp_path: Path) -> None:
    train = "id,text,kind\n" + "".join(f"{n},comment {n},{'ab'[n % 2]}\n" for n in range(60))
    found = infer(multilabel(tmp_path / "a", "id,a,b\n100,0.5,0.5\n101,0.5,0.5\n", train))
    assert (found.spec.target_column, found.metadata.evaluation_metric) == ("kind", "log_loss")
