"""Settings by the names of other libraries, and where their counterparts are passed."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.errors import nearest

_IN_TRAIN = {
    "num_epochs": "num_epochs epochs max_epochs n_epochs num_train_epochs",
    "save_dir": "save_dir output_dir out_dir default_root_dir checkpoint_dir project_dir",
    "save_freq": "save_freq save_every save_interval",
    "best_model_metric": "best_model_metric metric_for_best_model monitor",
    "early_stopping_patience": "early_stopping_patience patience early_stopping",
    "best_mode": "best_mode mode greater_is_better",
    "callbacks": "callbacks",
    "resume_from": "resume_from resume resume_from_checkpoint ckpt_path",
    "train_dataloader": "train_dataloader train_dataloaders train_loader dataloader",
    "eval_dataloader": "eval_dataloader val_dataloader val_dataloaders val_loader eval_loader",
}
_HERE = {
    "gradient_accumulation_steps": "accumulate_grad_batches accumulation_steps grad_accum_steps grad_accumulation",
    "max_grad_norm": "gradient_clip_val grad_clip clip_grad clip_grad_norm grad_norm max_norm gradient_clipping",
    "mixed_precision": "precision amp use_amp fp16 bf16 amp_dtype",
    "log_interval": "log_every_n_steps logging_steps log_every log_steps",
    "learning_rate": "lr base_lr",
    "device": "accelerator",
    "parallel": "strategy devices num_processes num_nodes",
    "metrics": "compute_metrics metric",
    "trackers": "logger loggers report_to log_with tracker",
    "lr_scheduler": "lr_scheduler_type schedule",
    "scheduler": "lr_schedulers",
    "progress": "enable_progress_bar disable_tqdm progress_bar verbose",
    "ema_decay": "ema use_ema",
    "compile": "torch_compile compile_model",
    "save_total_limit": "keep_last save_last keep",
    "loss_fn": "loss criterion",
    "limit_eval_batches": "limit_val_batches",
}
_OF_A_LOADER = "batch_size num_workers shuffle drop_last pin_memory collate_fn sampler per_device_train_batch_size"


def hint_for_unknown(name: str, known: Sequence[str]) -> str:
    """Return where a setting that the trainer does not have is passed, or the nearest name that it has.

    Example:
        >>> hint_for_unknown("gradient_clip_val", []), hint_for_unknown("batch_size", [])
        ('did you mean max_grad_norm?', 'pass it to the DataLoader')
        >>> hint_for_unknown("seed", []), hint_for_unknown("min_dleta", ["min_delta"])
        ('call treadle.set_seed(...) before building the model', "did you mean 'min_delta'?")
    """
    if name == "seed":
        return "call treadle.set_seed(...) before building the model"
    if name in _OF_A_LOADER.split():
        return "pass it to the DataLoader"
    for ours, theirs in _IN_TRAIN.items():
        if name in theirs.split():
            return f"pass {ours}= to train()"
    for ours, theirs in _HERE.items():
        if name in theirs.split():
            return f"did you mean {ours}?"
    return nearest(name, known)
