"""ResidualMAE: its linear part by the textbook formula, what it may read, masks, and training by the trainer."""

from __future__ import annotations

import pytest
import torch

from treadle import load_weights
from treadle.spectra import LinearGaussian, ResidualMAE, SpectraTrainer, TrainerConfig, build_optimizer
from treadle.spectra.losses import masked_uncertain
from treadle.spectra.masks import make_band_mask

torch.manual_seed(0)
ROWS = torch.randn(300, 3) @ torch.randn(3, 32) + 0.1 * torch.randn(300, 32) + 1.0
SEEN = torch.rand(6, 32) < 0.4
SEEN[0], SEEN[1] = False, True
SIZES = {"seq_len": 32, "d_model": 8, "nhead": 2, "num_layers": 1, "decoder_layers": 1, "dim_feedforward": 8,
         "patch": 4, "rank": 3, "n_blocks": 8, "n_mask": 6, "latent_dim": 4}  # fmt: skip


def model() -> ResidualMAE:
    torch.manual_seed(1)
    made = ResidualMAE(**SIZES)
    made.fit(ROWS)
    return made


def moved(made: ResidualMAE) -> ResidualMAE:
    """Give the last layer weights, so that the network counts."""
    with torch.no_grad():
        made.decoder.weight.normal_(std=0.3)
    return made


def test_spectra_with_gaps_are_not_fitted_to() -> None:
    rows = ROWS.clone()
    rows[7, 3] = torch.nan
    with pytest.raises(ValueError, match="train: 1 of 300 rows are not finite"):
        ResidualMAE(**SIZES).fit(rows)


def test_the_linear_part_is_the_conditional_of_its_covariance() -> None:
    gaussian = LinearGaussian(32, 3)
    gaussian.fit(ROWS)
    factors = gaussian.factors.double()
    covariance = factors @ factors.T + gaussian.noise.double().diag()
    mean, variance = gaussian(ROWS[:6], SEEN)
    for row, seen in enumerate(SEEN):
        gain = covariance[:, seen] @ torch.linalg.inv(covariance[seen][:, seen])
        wanted = gaussian.mean.double() + gain @ (ROWS[row].double() - gaussian.mean.double())[seen]
        spread = covariance.diagonal() - (gain * covariance[:, seen]).sum(1)
        torch.testing.assert_close(mean[row][~seen].double(), wanted[~seen], rtol=0, atol=1e-4)
        torch.testing.assert_close(variance[row][~seen].double(), spread[~seen], rtol=1e-4, atol=0)


def test_it_starts_as_its_linear_part() -> None:
    made = model()
    x_recon, z, seen, unsure = made(ROWS[:6], SEEN, with_uncertainty=True)
    mean, variance = made.encoder.gaussian(ROWS[:6], SEEN)
    assert torch.equal(x_recon, mean)
    assert torch.equal(unsure.log_variance, variance.log())
    assert seen is SEEN
    torch.testing.assert_close(z.norm(dim=1), torch.ones(6))


def test_hidden_values_are_never_read_and_rows_do_not_meet() -> None:
    made = moved(model()).eval()
    one = made(ROWS[:6], SEEN, with_uncertainty=True)
    two = made(torch.where(SEEN, ROWS[:6], torch.nan), SEEN, with_uncertainty=True)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[3].log_variance, two[3].log_variance)
    torch.testing.assert_close(made(ROWS[2:3], SEEN[2:3])[0][0], one[0][2], rtol=1e-5, atol=1e-5)
    assert not torch.equal(one[0], made.encoder.gaussian(ROWS[:6], SEEN)[0])


def test_masks_go_from_a_narrow_band_to_all_but_one() -> None:
    hidden = make_band_mask(4000, 64, 16, generator=torch.Generator().manual_seed(0)).float().mean(1)
    assert 0 < hidden.min() <= 0.05
    assert 0.9 <= hidden.max() < 1
    made = model()
    assert torch.equal(made.make_visible(5, n_mask=6).sum(1), torch.full((5,), 8))
    with pytest.raises(ValueError, match="is on"):
        make_band_mask(2, 64, 16, generator=_Elsewhere())  # type: ignore[arg-type]


class _Elsewhere:
    device = torch.device("cuda")


def test_the_variance_does_not_weight_the_error() -> None:
    x_recon = torch.zeros(1, 4, requires_grad=True)
    log_variance = torch.zeros(1, 4, requires_grad=True)
    x, mask = torch.tensor([[2.0, 2.0, float("nan"), 2.0]]), torch.tensor([[True, True, False, True]])
    for shift in (0.0, 3.0):
        loss = masked_uncertain(x_recon, x, mask, log_variance=log_variance + shift, prior_variance=torch.ones(1, 4))
        first, second = torch.autograd.grad(loss, (x_recon, log_variance))
        torch.testing.assert_close(first, torch.tensor([[-4 / 3, -4 / 3, 0.0, -4 / 3]]))
        assert torch.equal(second != 0, mask)
    with pytest.raises(ValueError, match="reduction"):
        masked_uncertain(x_recon, x, mask, log_variance=x_recon, prior_variance=x, reduction="most")


def test_a_trainer_trains_it_below_its_linear_part_and_resumes_to_the_bit(tmp_path) -> None:
    curved = torch.linspace(-1, 1, 256)[:, None] * torch.linspace(0.5, 2, 32)
    rows = (3 * curved).sin()

    def train(folder, epochs):
        torch.manual_seed(0)
        made = ResidualMAE(**{**SIZES, "d_model": 16, "dim_feedforward": 32, "dropout": 0.0})
        made.fit(rows)
        loader = torch.utils.data.DataLoader(rows, 32, shuffle=True)
        cfg = TrainerConfig(out_dir=tmp_path / folder, amp=False, device="cpu", use_ema=False, early_stop_patience=None)
        optimizer = build_optimizer(made, lr=5e-3)
        trainer = SpectraTrainer(
            made, optimizer, loader, torch.utils.data.DataLoader(rows, 64), cfg=cfg, progress=False
        )
        for until in epochs:
            trainer.fit(until)
        return trainer, load_weights(tmp_path / folder / "checkpoints" / "last.pt")

    trainer, whole = train("whole", [6])
    assert trainer.history[-1]["val_loss"] < 0.9 * trainer.history[0]["val_loss"]
    train("cut", [3])
    _, resumed = train("cut", [6])
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
