"""Flags of models that are not part of this project, or not yet."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option
from megatron.core.config.parse import strict_bool


@dataclass(frozen=True, kw_only=True)
class OutOfScopeFlags:
    """Flags of models that are not part of this project, or not yet."""

    onnx_safe: bool | None = option(None, "", group="network size", parse=strict_bool)
    use_legacy_models: bool = option(False, "", group="training")
    ict_head_size: int | None = option(None, "", group="biencoder")
    biencoder_projection_dim: int = option(0, "", group="biencoder")
    biencoder_shared_query_context_model: bool = option(False, "", group="biencoder")
    ict_load: str | None = option(None, "", group="biencoder")
    bert_load: str | None = option(None, "", group="biencoder")
    titles_data_path: str | None = option(None, "", group="biencoder")
    query_in_block_prob: float = option(0.1, "", group="biencoder")
    use_one_sent_docs: bool = option(False, "", group="biencoder")
    evidence_data_path: str | None = option(None, "", group="biencoder")
    retriever_report_topk_accuracies: tuple[int, ...] = option((), "", group="biencoder", nargs="+")
    retriever_score_scaling: bool = option(False, "", group="biencoder")
    block_data_path: str | None = option(None, "", group="biencoder")
    embedding_path: str | None = option(None, "", group="biencoder")
    indexer_batch_size: int = option(128, "", group="biencoder")
    indexer_log_interval: int = option(1000, "", group="biencoder")
    num_classes: int = option(1000, "", group="vision")
    img_h: int = option(224, "", group="vision")
    img_w: int = option(224, "", group="vision")
    num_channels: int = option(3, "", group="vision")
    patch_dim: int = option(16, "", group="vision")
    classes_fraction: float = option(1.0, "", group="vision")
    data_per_class_fraction: float = option(1.0, "", group="vision")
    data_sharding: bool = option(True, "", group="vision")
    head_lr_mult: float = option(1.0, "", group="vision")
    vision_pretraining: bool = option(False, "", group="vision")
    vision_pretraining_type: str = option(
        "classify",
        "",
        group="vision",
        choices=("classify", "inpaint", "dino"),
    )
    vision_backbone_type: str = option("vit", "", group="vision", choices=("vit", "mit", "swin"))
    swin_backbone_type: str = option("tiny", "", group="vision", choices=("tiny", "base", "h3"))
    mask_type: str = option("random", "", group="vision", choices=("random", "row"))
    mask_factor: float = option(1.0, "", group="vision")
    iter_per_epoch: int = option(1250, "", group="vision")
    dino_local_img_size: int = option(96, "", group="vision")
    dino_local_crops_number: int = option(10, "", group="vision")
    dino_head_hidden_size: int = option(2048, "", group="vision")
    dino_bottleneck_size: int = option(256, "", group="vision")
    dino_freeze_last_layer: float = option(1.0, "", group="vision")
    dino_norm_last_layer: bool = option(False, "", group="vision")
    dino_warmup_teacher_temp: float = option(0.04, "", group="vision")
    dino_teacher_temp: float = option(0.07, "", group="vision")
    dino_warmup_teacher_temp_epochs: int = option(30, "", group="vision")
    retro_project_dir: str | None = option(None, "", group="retro")
    retro_add_retriever: bool = option(False, "", group="retro")
    retro_cyclic_train_iters: int | None = option(None, "", group="retro")
    retro_encoder_layers: int = option(2, "", group="retro")
    retro_encoder_hidden_dropout: float = option(0.1, "", group="retro")
    retro_encoder_attention_dropout: float = option(0.1, "", group="retro")
    retro_num_neighbors: int = option(2, "", group="retro")
    retro_num_retrieved_chunks: int = option(2, "", group="retro")
    retro_attention_gate: float = option(1.0, "", group="retro")
    retro_verify_neighbor_count: bool = option(
        True,
        "",
        group="retro",
        flag="--retro-no-verify-neighbor-count",
    )
