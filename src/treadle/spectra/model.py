"""ChemoMAE, a masked autoencoder for 1-D spectra.

Shapes: B = rows, L = channels (``seq_len``), Z = latent width. ``visible_mask`` is True where a channel is visible to
the encoder.
"""

from __future__ import annotations

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.spectra.encoder import SpectrumDecoder, SpectrumEncoder
from treadle.spectra.masks import CountedMasksAutoencoder, check_blocks, check_mask_count, make_block_mask


class ChemoMAE(CountedMasksAutoencoder):
    """Masked autoencoder of spectra with a latent on the unit sphere.

    The encoder sees only the visible channels (one token each, preceded by a CLS token); the decoder is a linear map of
    the latent. Hidden values therefore affect neither ``z`` nor ``x_recon``. Given a ``visible_mask``, the output in
    eval mode is deterministic, and each row is independent of the others.

    Args:
        seq_len: Channels L of a spectrum, a multiple of ``n_blocks``.
        d_model: Width of the tokens, a multiple of ``nhead``; even or odd.
        nhead: Attention heads.
        num_layers: Transformer layers, at least 1.
        dim_feedforward: Width of the feed-forward part of a layer.
        dropout: Dropout probability, 0 to 1.
        use_learnable_pos: Learned positions; False uses fixed sine/cosine positions.
        latent_dim: Width Z of the latent.
        n_blocks: Equal blocks that masks are drawn over.
        n_mask: Blocks hidden by default, 0 to ``n_blocks``.

    Attributes:
        takes_counted_mask: Whether ``forward`` accepts ``visible_mask`` and ``visible_count`` as in this class. The
            trainer then draws the mask, which a captured step needs; otherwise the model draws it in ``forward``. A
            class that overrides ``forward`` must set it.

    Raises:
        ValueError: When an argument is out of range.

    Example:
        >>> import torch
        >>> model = ChemoMAE(seq_len=64, d_model=16, nhead=2, num_layers=1, n_blocks=8, n_mask=4).eval()
        >>> x_recon, z, visible_mask = model(torch.randn(5, 64))
        >>> x_recon.shape, z.shape, visible_mask.sum(dim=1).tolist()
        (torch.Size([5, 64]), torch.Size([5, 64]), [32, 32, 32, 32, 32])
    """

    _make_mask = staticmethod(make_block_mask)
    _parts = "n_blocks"

    @checked
    def __init__(
        self,
        *,
        seq_len: int,
        d_model: int = 256,
        nhead: int = 4,
        num_layers: int = 4,
        dim_feedforward: int = 1024,
        dropout: float = 0.1,
        use_learnable_pos: bool = True,
        latent_dim: int = 64,
        n_blocks: int = 32,
        n_mask: int = 16,
    ) -> None:
        super().__init__()
        check_blocks(seq_len, n_blocks)
        check_mask_count(n_mask, n_blocks)
        check_least(1, d_model=d_model, nhead=nhead, num_layers=num_layers)
        check_least(1, dim_feedforward=dim_feedforward, latent_dim=latent_dim)
        if d_model % nhead != 0:
            raise ConfigError(
                f"={d_model} must be a multiple of nhead={nhead}, as every head gets an equal share; "
                "change one of the two",
                argument="d_model",
            )
        self.seq_len = seq_len
        self.latent_dim = latent_dim
        self.n_blocks = n_blocks
        self.n_mask = n_mask
        self.encoder = SpectrumEncoder(
            seq_len=seq_len,
            d_model=d_model,
            nhead=nhead,
            num_layers=num_layers,
            dim_feedforward=dim_feedforward,
            dropout=dropout,
            use_learnable_pos=use_learnable_pos,
            latent_dim=latent_dim,
        )
        self.decoder = SpectrumDecoder(seq_len=seq_len, latent_dim=latent_dim)
