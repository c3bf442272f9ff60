"""Your own molecules, as SMILES with a target each: graphs, encodings, training, and predictions for new ones.

python examples/graphs_own_molecules.py --out runs/own_molecules
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from rdkit import Chem, RDConfig
from rdkit.Chem.Crippen import MolLogP
from torch_geometric.loader import DataLoader

import treadle.graphs as tg
from treadle import load_weights
from treadle.graphs.datasets.molecules import graph_from_smiles


def read_molecules(count: int) -> list[tuple[str, float]]:
    """Return the content of a file like yours: SMILES and targets, here NCI molecules with their logP."""
    lines = Path(RDConfig.RDDataDir, "NCI", "first_5K.smi").read_text().splitlines()[:count]
    smiles = [line.split()[0] for line in lines]
    return [(text, MolLogP(Chem.MolFromSmiles(text))) for text in smiles]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/own_molecules"))
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)

    encode = tg.AddPositionalEncodings("default")  # walks of 1 to 20 steps, and the hops between all pairs
    graphs = []
    for smiles, number in read_molecules(options.count):
        graph = encode(graph_from_smiles(smiles))
        graph.y = torch.tensor([[number]])
        graphs.append(graph)
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled, tenth = [graphs[i] for i in order], len(graphs) // 10
    test, val, train = shuffled[:tenth], shuffled[tenth : 2 * tenth], shuffled[2 * tenth :]

    tg.set_seed(0)
    model = tg.get_model(
        "gps", num_features=graphs[0].x.shape[1], num_edge_features=graphs[0].edge_attr.shape[1], hidden_dim=48,
        num_layers=3, num_heads=4, dropout=0.0, mpnn_type="gatedgcn", node_pe_dim=graphs[0].node_pe.shape[1],
        relative_pe_dim=graphs[0].edge_pe.shape[1], statistics=tg.graph_statistics(train),
    )  # fmt: skip
    optimizer = tg.get_optimizer(model, lr=2e-3)
    scheduler = tg.get_scheduler(optimizer, total_epochs=options.epochs, warmup_epochs=2)
    trainer = tg.GraphTrainer(
        model, optimizer, scheduler, tg.get_loss_fn("regression", "mae"), grad_clip=1.0, checkpoint_dir=options.out
    )
    trainer.fit(
        DataLoader(train, 16, shuffle=True), DataLoader(val, 64), options.epochs,
        resume_from="auto",  # after any stop, the same command resumes and ends with the same weights
    )  # fmt: skip

    model.load_state_dict(load_weights(options.out / "best.pt"))
    true, predicted = torch.cat([graph.y for graph in test]), trainer.predict(DataLoader(test, 64))
    guess = torch.cat([graph.y for graph in train]).mean()
    print(f"mean absolute error {(predicted - true).abs().mean():.3f}, of the mean {(guess - true).abs().mean():.3f}")
    caffeine = encode(graph_from_smiles("Cn1cnc2c1c(=O)n(C)c(=O)n2C"))
    print(f"caffeine: predicted {trainer.predict([caffeine]).item():.2f}")


if __name__ == "__main__":
    main()
