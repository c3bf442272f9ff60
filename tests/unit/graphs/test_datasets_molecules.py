"""SMILES to graphs, penalised logP, and the two sets of molecules that need no download."""

from __future__ import annotations

import gzip
import importlib.util
import logging
import sys

import pytest
import torch
from rdkit import RDConfig

from graph_data_kit import fields
from treadle.errors import ConfigError
from treadle.graphs.datasets import get_dataset
from treadle.graphs.datasets.molecules import (
    ATOM_COLUMNS,
    BOND_COLUMNS,
    UnusableMoleculeError,
    graph_from_smiles,
    graphs_from_smiles,
)
from treadle.graphs.datasets.targets import penalized_logp

# A dative bond, a valence RDKit refuses, no SMILES at all.
FERROCENE = "CN(C)C[C-]12C3=C4C5=C1[Fe++]23456789[C-]%10C6=C7C8=C9%10"
WRONG = ("CCO1=O=C1C2=CC=C(O2)C(C)(C)C", "not a molecule")
GOOD = ("CCO", "c1ccccc1", "CC(=O)Oc1ccccc1C(=O)O", "C1CCCCCCC1", "[Na+].[Cl-]", "C", "C#N", "CCN", "CCC", "CCCl")


def says(row, columns):
    return {name for name, value in zip(columns, row.tolist(), strict=True) if value == 1}


def test_an_atom_has_one_entry_of_each_property():
    graph = graph_from_smiles("C[NH3+]")
    assert says(graph.x[1], ATOM_COLUMNS) == {
        "element N", "degree 4", "charge 1", "hydrogens 3", "hybridisation SP3",
    }  # fmt: skip
    assert says(graph_from_smiles("c1ccccc1").x[0], ATOM_COLUMNS) == {
        "element C", "degree 3", "charge 0", "hydrogens 1", "hybridisation SP2", "aromatic", "in ring",
    }  # fmt: skip


def test_what_is_not_listed_is_other():
    assert {"element other", "charge other"} <= says(graph_from_smiles("[Ti+4]").x[0], ATOM_COLUMNS)


def test_every_bond_has_both_directions_with_the_same_entries():
    graph = graph_from_smiles("C=CC#N")
    assert graph.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    assert torch.equal(graph.edge_attr[0::2], graph.edge_attr[1::2])
    assert [says(row, BOND_COLUMNS) for row in graph.edge_attr[0::2]] == [
        {"bond DOUBLE", "conjugated"}, {"bond SINGLE", "conjugated"}, {"bond TRIPLE", "conjugated"},
    ]  # fmt: skip


def test_a_single_atom_and_ions_have_no_edges():
    graph = graph_from_smiles("[Na+].[Cl-]")
    assert graph.x.shape == (2, len(ATOM_COLUMNS))
    assert graph.edge_index.shape == (2, 0)
    assert graph.edge_attr.shape == (0, len(BOND_COLUMNS))


@pytest.mark.parametrize(
    ("smiles", "reason"),
    [(FERROCENE, "DATIVE"), (WRONG[0], "cannot read"), (WRONG[1], "cannot read"), ("", "no atoms")],
)
def test_a_molecule_that_gives_no_graph_says_why(smiles, reason):
    with pytest.raises(UnusableMoleculeError, match=reason):
        graph_from_smiles(smiles)


def test_wrong_molecules_are_left_out_counted_and_named_in_one_line(caplog, capfd):
    smiles = [GOOD[0], WRONG[0], *GOOD[1:], WRONG[1], FERROCENE, ""]
    with caplog.at_level(logging.WARNING, "treadle"):
        graphs, unusable = graphs_from_smiles(smiles, source="these", num_workers=0)
    assert [graph.smiles for graph in graphs] == list(GOOD)
    assert len(unusable) == 4
    (line,) = caplog.messages
    assert line.startswith(f"these: 4 of {len(smiles)} SMILES left out: number 2, {WRONG[0]!r}: RDKit cannot read it")
    for wrong in (*WRONG, FERROCENE):
        assert repr(wrong) in line
    assert line.endswith("; and 1 more")
    assert capfd.readouterr().err == "", "RDKit's own complaints go past logging"


def test_of_very_many_wrong_molecules_the_line_names_the_first_and_the_list_names_all(caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        _, unusable = graphs_from_smiles([GOOD[0], *[WRONG[0]] * 30], source="these", num_workers=0)
    (line,) = caplog.messages
    assert "30 of 31 SMILES left out" in line
    assert line.endswith("and 27 more")
    assert len(unusable) == 30


def test_the_result_does_not_depend_on_the_number_of_processes():
    smiles = [GOOD[i % len(GOOD)] if i % 50 else WRONG[0] for i in range(300)]
    alone, unusable = graphs_from_smiles(smiles, source="these", num_workers=0)
    shared, others = graphs_from_smiles(smiles, source="these", num_workers=2)
    assert others == unusable
    assert len(alone) == 294
    assert [fields(graph) for graph in shared] == [fields(graph) for graph in alone]


# logP is a sum of Crippen's contributions, here by hand: an aromatic C-H is 0.1581 (C18) + 0.1230 (H1), a CH2 in a ring
# 0.1441 (C1) + 2 * 0.1230. SA is what Ertl's paper and RDKit's own test give: 1 for the simplest, 1.58 for aspirin.
@pytest.mark.parametrize(
    ("smiles", "log_p", "accessibility", "ring_penalty"),
    [
        ("c1ccccc1", 6 * (0.1581 + 0.1230), 1.0, 0),
        ("CC(=O)Oc1ccccc1C(=O)O", 1.3101, 1.5800, 0),
        ("C1CCCCCCC1", 8 * (0.1441 + 2 * 0.1230), 1.0, 2),
    ],
)
def test_penalised_logp_is_logp_minus_accessibility_minus_the_ring_penalty(smiles, log_p, accessibility, ring_penalty):
    assert penalized_logp(smiles) == pytest.approx(log_p - accessibility - ring_penalty, abs=2e-4)


def test_penalised_logp_of_what_is_no_molecule_is_an_error():
    with pytest.raises(ValueError, match="not a molecule"):
        penalized_logp("not a molecule")


@pytest.fixture
def small_nci(tmp_path, monkeypatch):
    """A file of the same form in place of RDKit's, with 19 good molecules and one wrong one."""
    (tmp_path / "NCI").mkdir()
    lines = [*(GOOD * 2)[:19], WRONG[0]]
    text = "".join(f"{smiles}\t{i}\n" for i, smiles in enumerate(lines))
    (tmp_path / "NCI" / "first_5K.smi").write_text(text)
    monkeypatch.setattr(RDConfig, "RDDataDir", str(tmp_path))
    return tmp_path


def test_nci_is_read_from_rdkit_and_split_by_a_fixed_seed(small_nci, tmp_path):
    data = get_dataset("nci", tmp_path / "data")
    assert [len(split) for split in data.get_splits()] == [16, 2, 1]  # not 17: two graphs are one molecule
    assert (data.level, data.task_type, data.num_classes) == ("graph", "regression", 1)
    assert data.train[0].x.shape[1] == data.num_features
    assert data.train[0].edge_attr.shape[1] == data.num_edge_features
    for split in data.get_splits():
        for graph in split:
            assert graph.y.shape == (1, 1)
            assert graph.y.item() == pytest.approx(penalized_logp(graph.smiles))
    again = get_dataset("nci", tmp_path / "other")
    assert [graph.smiles for graph in again.test] == [graph.smiles for graph in data.test]


@pytest.mark.parametrize("options", [{}, {"splits": "random", "seed": 3}])
def test_a_molecule_that_the_file_of_nci_has_twice_is_not_in_two_splits(small_nci, tmp_path, options):
    chains = ["C" * n for n in range(1, 41)]
    twice = ["OCC", "CCO", "C1=CC=CC=C1O", "Oc1ccccc1", "N[C@@H](C)O", "N[C@H](C)O", "CC#N", "N#CC"]
    lines = [*chains, *twice]
    (small_nci / "NCI" / "first_5K.smi").write_text("".join(f"{text}\t1\n" for text in lines))
    data = get_dataset("nci", tmp_path / "data", **options)
    assert [len(split) for split in data.get_splits()] == [40, 4, 4]
    train, val, test = ({graph.smiles for graph in split} for split in data.get_splits())
    assert train >= set(twice)  # under either name, and mirror images, which are one graph here
    assert train | val | test == set(lines)


def test_nci_is_processed_once_and_still_says_what_is_left_out(small_nci, tmp_path, monkeypatch, caplog):
    first = get_dataset("nci", tmp_path / "data")
    monkeypatch.setattr("treadle.graphs.datasets.offline.graphs_from_smiles", None)
    with caplog.at_level(logging.INFO, "treadle"):
        second = get_dataset("nci", tmp_path / "data")
    assert [line for line in caplog.messages if "1 of 20 SMILES left out" in line] != []
    assert [fields(graph) for graph in second.train] == [fields(graph) for graph in first.train]


def test_other_molecules_in_the_file_are_processed_anew(small_nci, tmp_path):
    get_dataset("nci", tmp_path / "data")
    (small_nci / "NCI" / "first_5K.smi").write_text("".join(f"{'C' * n}\t{n}\n" for n in range(1, 11)))
    assert len(get_dataset("nci", tmp_path / "data").train) == 8


@pytest.mark.slow
def test_the_whole_of_nci(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        data = get_dataset("nci", tmp_path)
    assert [len(split) for split in data.get_splits()] == [3992, 499, 499]
    assert [line for line in caplog.messages if line.startswith("nci: 9 of 4,999 SMILES left out")] != []
    y = torch.cat([graph.y for split in data.get_splits() for graph in split])
    assert y.mean().item() == pytest.approx(-0.170, abs=0.02)
    assert y.std().item() == pytest.approx(2.610, abs=0.02)


@pytest.fixture
def fake_moses(tmp_path, monkeypatch):
    """The package with its two files, whose code must not run."""
    package = tmp_path / "site" / "moses"
    (package / "dataset" / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    # Chains of carbon in one file and of oxygen in the other show where a molecule is from.
    for part, atom, count in (("train", "C", 40), ("test", "O", 12)):
        lines = "\n".join(["SMILES", *(f"{atom}{'C' * n}" for n in range(count))])
        (package / "dataset" / "data" / f"{part}.csv.gz").write_bytes(gzip.compress(f"{lines}\n".encode()))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package


SIZES = {"num_train": 20, "num_val": 5, "num_test": 6}


def test_clean_leads_are_read_without_importing_their_package(fake_moses, tmp_path):
    data = get_dataset("zinc_clean_leads", tmp_path, **SIZES)
    assert [len(split) for split in data.get_splits()] == [20, 5, 6]
    assert "moses" not in sys.modules


def test_the_test_set_of_clean_leads_is_from_the_test_file_whatever_the_split(fake_moses, tmp_path):
    for splits in ("official", "random"):
        data = get_dataset("zinc_clean_leads", tmp_path, splits=splits, seed=3, **SIZES)
        assert {graph.smiles[0] for graph in data.test} == {"O"}
        rest = [graph.smiles for split in (data.train, data.val) for graph in split]
        assert {smiles[0] for smiles in rest} == {"C"}
        assert len(set(rest)) == 25, "a molecule twice"


def test_a_wrong_molecule_in_the_files_of_clean_leads_is_left_out_of_its_own_split_and_named(
    fake_moses, tmp_path, caplog
):
    lines = "\n".join(["SMILES", *(f"O{'C' * n}" for n in range(5)), WRONG[0]])
    (fake_moses / "dataset" / "data" / "test.csv.gz").write_bytes(gzip.compress(f"{lines}\n".encode()))
    with caplog.at_level(logging.INFO, "treadle"):
        for _ in range(2):  # from the file the second time
            data = get_dataset("zinc_clean_leads", tmp_path, **SIZES)
            assert [len(split) for split in data.get_splits()] == [20, 5, 5]
            assert {graph.smiles[0] for graph in data.test} == {"O"}
    assert len([line for line in caplog.messages if "1 of 31 SMILES left out" in line and WRONG[0] in line]) == 2


def test_the_seed_chooses_the_molecules_and_the_same_seed_the_same(fake_moses, tmp_path):
    def chosen(seed):
        data = get_dataset("zinc_clean_leads", tmp_path, seed=seed, **SIZES)
        return [[graph.smiles for graph in split] for split in data.get_splits()]

    assert chosen(1) == chosen(1)
    assert chosen(1)[0] != chosen(2)[0]
    assert chosen(1)[2] != chosen(2)[2]


@pytest.mark.parametrize(
    ("given", "rule"),
    [({"num_test": 13}, "num_test = 13"), ({"num_train": 36}, "num_val = 41"), ({"num_val": 0}, "num_val=0")],
)
def test_more_or_fewer_molecules_than_there_are_is_an_error(fake_moses, tmp_path, given, rule):
    with pytest.raises(ConfigError, match=rule):
        get_dataset("zinc_clean_leads", tmp_path, **{**SIZES, **given})


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps molsets"):
        get_dataset("zinc_clean_leads", tmp_path)


def test_rdkit_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit.RDConfig", None)
    with pytest.raises(ImportError, match=r"treadle\[graphs\]"):
        get_dataset("nci", tmp_path)
