"""CleanRL's DQN: the loader plays the game, fills the replay buffer and yields batches; CartPole is included.

Any loader with ``state_dict`` and ``load_state_dict`` is in the checkpoint: here game, buffer and exploration.

    python examples/ports/dqn.py --max-steps 3000
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from torch import nn

import treadle


class CartPole:
    """Environment like Gym's CartPole-v1."""

    def reset(self, generator):
        self.state, self.time = (torch.rand(4, generator=generator) - 0.5) / 10, 0
        return self.state

    def step(self, action):
        x, speed, angle, turn = self.state.tolist()
        force, self.time = 10.0 if action else -10.0, self.time + 1
        push = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        bend = 9.8 * math.sin(angle) - math.cos(angle) * push
        spin = bend / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        pull = push - 0.05 * spin * math.cos(angle) / 1.1
        self.state = torch.tensor([x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * spin])
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)
        return self.state, bool(fell), bool(fell or self.time >= 500)


class Experience:
    """Loader that plays ``per_batch`` moves with the current model and yields a random batch from its memory."""

    def __init__(self, model, *, batch=64, size=5000, per_batch=4, decay=1500, seed=0):
        self.model, self.batch, self.size, self.per_batch, self.decay = model, batch, size, per_batch, decay
        self.generator, self.game = torch.Generator().manual_seed(seed), CartPole()
        self.memory = torch.zeros(size, 11)  # state, action, reward, next state, whether the pole fell
        self.moves, self.lengths = 0, [0]
        self.game.reset(self.generator)

    def __iter__(self):
        while True:
            while self.moves % self.per_batch or self.moves < self.batch:
                self.move()
            known = torch.randint(min(self.moves, self.size), (self.batch,), generator=self.generator)
            self.move()
            yield self.memory[known]

    @torch.no_grad()
    def move(self):
        state, explores = self.game.state, max(0.05, 1 - self.moves / self.decay)
        greedy = torch.rand(1, generator=self.generator).item() >= explores
        choice = self.model(state).argmax() if greedy else torch.randint(2, (1,), generator=self.generator)
        after, fell, over = self.game.step(int(choice))
        row = torch.cat([state, torch.tensor([float(choice), 1.0]), after, torch.tensor([float(fell)])])
        self.memory[self.moves % self.size] = row
        self.moves, self.lengths[-1] = self.moves + 1, self.game.time
        if over:
            self.lengths.append(0)
            self.game.reset(self.generator)

    def state_dict(self):
        state = {name: copy.deepcopy(vars(self)[name]) for name in ("memory", "moves", "lengths")}
        return {**state, "game": dict(vars(self.game)), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        vars(self).update({name: copy.deepcopy(state[name]) for name in ("memory", "moves", "lengths")})
        vars(self.game).update(state["game"])
        self.generator.set_state(state["generator"])


class Dqn(treadle.BaseTrainer):
    def build_data_loader(self):
        self.network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.target_network = copy.deepcopy(self.network)
        return Experience(self.network)

    def build_model(self):
        return self.network.to(self.device)

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def build_hooks(self):
        return [treadle.ProgressHook(500, with_records=True), treadle.CheckpointingHook(500, exit_signals=[2, 15])]

    def forward(self, rows):
        state, action, reward, after, fell = rows.split([4, 1, 1, 4, 1], dim=1)
        if self.step % 100 == 1:
            self.target_network.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            target = reward + 0.99 * self.target_network(after).amax(1, keepdim=True) * (1 - fell)
        value = self.model(state).gather(1, action.long())
        lengths = self.data_loader.lengths[-11:-1]
        return nn.functional.smooth_l1_loss(value, target), {"game": sum(lengths) / max(1, len(lengths))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=3000)
    parser.add_argument("--out", default="runs/dqn")
    args = parser.parse_args()
    treadle.set_seed(0)
    Dqn(args.max_steps, workspace=args.out, device="cpu", grad_clip=10.0).train()


if __name__ == "__main__":
    main()
