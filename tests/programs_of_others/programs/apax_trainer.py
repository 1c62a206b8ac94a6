import csv
import pathlib

import ase
import ase.calculators.singlepoint
import ase.io
import numpy as np
from apax.train.checkpoints import load_params
from apax.train.run import run

from tests.programs_of_others.training import ROOT, die_once, report


def molecule(number):
    draw = np.random.default_rng(number)
    atoms = ase.Atoms("OHH", np.eye(3) + draw.normal(size=(3, 3)) / 20)
    results = {"energy": draw.normal(), "forces": draw.normal(size=(3, 3))}
    atoms.calc = ase.calculators.singlepoint.SinglePointCalculator(atoms, **results)
    return atoms


def epochs():
    return list(csv.DictReader(log.open())) if log.exists() else []


ase.io.write("data.extxyz", [molecule(number) for number in range(8)])
log = pathlib.Path(ROOT, "run", "log.csv")
before = len(epochs())
die_once(lambda: len(epochs()))
run(
    {
        "n_epochs": 8,
        "ckpt_interval": 1,
        "data": {
            "directory": ROOT,
            "experiment": "run",
            "train_data_path": "data.extxyz",
            "val_data_path": "data.extxyz",
            "batch_size": 8,
            "valid_batch_size": 8,
        },
        "model": {"name": "gmnn", "nn": [8]},
        "loss": [{"name": "energy"}, {"name": "forces"}],
        "progress_bar": {"disable_epoch_pbar": True},
    }
)
losses = {int(row["epoch"]): row["val_loss"] for row in epochs()[before:]}
report(min(losses), losses, load_params(log.parent / "latest", best=False))
