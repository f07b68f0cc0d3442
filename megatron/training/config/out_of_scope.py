"""Flags of models that are not part of this project, or not yet."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option
from megatron.core.config.parse import strict_bool


@dataclass(frozen=True, kw_only=True)
class OutOfScopeFlags:
    """Flags of models that are not part of this project, or not yet."""

    onnx_safe: bool | None = option(
        None,
        "Avoid operations that ONNX cannot express.",
        group="network size",
        parse=strict_bool,
        ignored=states.OLD_SPELLING,
    )
    use_legacy_models: bool = option(
        False,
        "Models of the reference before its core library.",
        group="training",
        refused=states.LEGACY_MODELS,
    )
    ict_head_size: int | None = option(
        None,
        "Width of the retriever's embeddings in ICT.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    biencoder_projection_dim: int = option(
        0,
        "Width of a projection behind the retriever; 0 means none.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    biencoder_shared_query_context_model: bool = option(
        False,
        "Embed queries and contexts with one model.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    ict_load: str | None = option(
        None,
        "Directory of an ICT checkpoint.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    bert_load: str | None = option(
        None,
        "Directory of a BERT checkpoint that ICT starts from.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    titles_data_path: str | None = option(
        None,
        "Data prefix of document titles.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    query_in_block_prob: float = option(
        0.1,
        "Probability that a query stays in its block.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    use_one_sent_docs: bool = option(
        False,
        "Use documents of a single sentence too.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    evidence_data_path: str | None = option(
        None,
        "File of evidence passages.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    retriever_report_topk_accuracies: tuple[int, ...] = option(
        (),
        "Values of k whose retrieval accuracy is reported.",
        group="biencoder",
        nargs="+",
        refused=states.RETRIEVER,
    )
    retriever_score_scaling: bool = option(
        False,
        "Divide retrieval scores by the root of the width.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    block_data_path: str | None = option(
        None,
        "File of embedded blocks.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    embedding_path: str | None = option(
        None,
        "File of embeddings for open retrieval.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    indexer_batch_size: int = option(
        128,
        "Samples in a batch while blocks are embedded.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    indexer_log_interval: int = option(
        1000,
        "Batches between lines while blocks are embedded.",
        group="biencoder",
        refused=states.RETRIEVER,
    )
    num_classes: int = option(
        1000,
        "Classes of an image classifier.",
        group="vision",
        refused=states.VISION,
    )
    img_h: int = option(
        224,
        "Height of images in pixels.",
        group="vision",
        refused=states.VISION,
    )
    img_w: int = option(
        224,
        "Width of images in pixels.",
        group="vision",
        refused=states.VISION,
    )
    num_channels: int = option(
        3,
        "Channels of images.",
        group="vision",
        refused=states.VISION,
    )
    patch_dim: int = option(
        16,
        "Side of an image patch in pixels.",
        group="vision",
        refused=states.VISION,
    )
    classes_fraction: float = option(
        1.0,
        "Share of the classes that is trained on.",
        group="vision",
        refused=states.VISION,
    )
    data_per_class_fraction: float = option(
        1.0,
        "Share of each class's images that is trained on.",
        group="vision",
        refused=states.VISION,
    )
    data_sharding: bool = option(
        True,
        "Do not divide image folders over ranks.",
        group="vision",
        refused=states.VISION,
    )
    head_lr_mult: float = option(
        1.0,
        "Learning rate of the classifier's head over that of the rest.",
        group="vision",
        refused=states.VISION,
    )
    vision_pretraining: bool = option(
        False,
        "Pretrain a vision model.",
        group="vision",
        refused=states.VISION,
    )
    vision_pretraining_type: str = option(
        "classify",
        "Task of vision pretraining.",
        group="vision",
        choices=("classify", "inpaint", "dino"),
        refused=states.VISION,
    )
    vision_backbone_type: str = option(
        "vit",
        "Architecture of the vision model.",
        group="vision",
        choices=("vit", "mit", "swin"),
        refused=states.VISION,
    )
    swin_backbone_type: str = option(
        "tiny",
        "Size of a Swin model.",
        group="vision",
        choices=("tiny", "base", "h3"),
        refused=states.VISION,
    )
    mask_type: str = option(
        "random",
        "How image patches are hidden for inpainting.",
        group="vision",
        choices=("random", "row"),
        refused=states.VISION,
    )
    mask_factor: float = option(
        1.0,
        "Size factor of hidden patches.",
        group="vision",
        refused=states.VISION,
    )
    iter_per_epoch: int = option(
        1250,
        "Steps that count as one epoch of images.",
        group="vision",
        refused=states.VISION,
    )
    dino_local_img_size: int = option(
        96,
        "Side of DINO's local crops in pixels.",
        group="vision",
        refused=states.VISION,
    )
    dino_local_crops_number: int = option(
        10,
        "Local crops of each image in DINO.",
        group="vision",
        refused=states.VISION,
    )
    dino_head_hidden_size: int = option(
        2048,
        "Width of DINO's head.",
        group="vision",
        refused=states.VISION,
    )
    dino_bottleneck_size: int = option(
        256,
        "Width of the bottleneck in DINO's head.",
        group="vision",
        refused=states.VISION,
    )
    dino_freeze_last_layer: float = option(
        1.0,
        "Epochs during which DINO's last layer is frozen.",
        group="vision",
        refused=states.VISION,
    )
    dino_norm_last_layer: bool = option(
        False,
        "Normalise DINO's last layer.",
        group="vision",
        refused=states.VISION,
    )
    dino_warmup_teacher_temp: float = option(
        0.04,
        "First temperature of DINO's teacher.",
        group="vision",
        refused=states.VISION,
    )
    dino_teacher_temp: float = option(
        0.07,
        "Temperature of DINO's teacher after warm-up.",
        group="vision",
        refused=states.VISION,
    )
    dino_warmup_teacher_temp_epochs: int = option(
        30,
        "Epochs over which the teacher's temperature rises.",
        group="vision",
        refused=states.VISION,
    )
    retro_project_dir: str | None = option(
        None,
        "Directory of a retrieval project.",
        group="retro",
        refused=states.RETRO,
    )
    retro_add_retriever: bool = option(
        False,
        "Add retrieval to the model.",
        group="retro",
        refused=states.RETRO,
    )
    retro_cyclic_train_iters: int | None = option(
        None,
        "Steps after which retrieval data repeats.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_encoder_layers: int = option(
        2,
        "Layers of the encoder of neighbours.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_encoder_hidden_dropout: float = option(
        0.1,
        "Hidden dropout of the encoder of neighbours.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_encoder_attention_dropout: float = option(
        0.1,
        "Attention dropout of the encoder of neighbours.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_num_neighbors: int = option(
        2,
        "Neighbours that are retrieved for each chunk.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_num_retrieved_chunks: int = option(
        2,
        "Chunks of each neighbour.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_attention_gate: float = option(
        1.0,
        "Gate of attention to neighbours.",
        group="retro",
        ignored=states.only_with("--retro-add-retriever"),
    )
    retro_verify_neighbor_count: bool = option(
        True,
        "Accept chunks with fewer neighbours.",
        group="retro",
        flag="--retro-no-verify-neighbor-count",
        ignored=states.only_with("--retro-add-retriever"),
    )
