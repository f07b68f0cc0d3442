"""Megatron-LM flags of models and features that this project does not implement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.config.parse import strict_bool

_ict = partial(option, group="biencoder", refused=flag_messages.RETRIEVER)
_vision = partial(option, group="vision", refused=flag_messages.VISION)
_modelopt = partial(option, group="ModelOpt")
_retro = partial(option, group="retro")
_retro_detail = partial(_retro, ignored=flag_messages.only_with("--retro-add-retriever"))


@dataclass(frozen=True, kw_only=True)
class OutOfScopeFlags:
    onnx_safe: bool | None = option(
        None,
        "Avoid operations that ONNX cannot express.",
        group="network size",
        parse=strict_bool,
        ignored=flag_messages.OLD_SPELLING,
    )
    use_legacy_models: bool = option(
        False,
        "Use Megatron-LM's legacy models instead of its core library's.",
        group="training",
        refused=flag_messages.LEGACY_MODELS,
    )
    export_te_mcore_model: bool = _modelopt(
        False,
        "Build the layers of Transformer Engine in a script of ModelOpt.",
        ignored="--transformer-impl transformer_engine, the default, builds them",
    )
    export_force_local_attention: bool = _modelopt(
        False,
        "Build Megatron Core's own attention in a script of ModelOpt.",
        ignored="--attention-backend chooses the attention",
    )
    export_model_type: str = _modelopt(
        "GPTModel",
        "Class of the model in a script of ModelOpt.",
        ignored="the entry program, or --model-kind, chooses the model",
    )
    export_legacy_megatron: bool = _modelopt(
        False,
        "Write a checkpoint of Megatron-LM's legacy models.",
        refused=flag_messages.LEGACY_MODELS,
    )
    export_quant_cfg: str | None = _modelopt(
        None, "Format of ModelOpt's quantization.", refused=flag_messages.MODELOPT
    )
    export_real_quant_cfg: str = _modelopt(
        "None",
        "Format of ModelOpt's weights in low precision.",
        refused=flag_messages.MODELOPT,
    )
    export_kv_cache_quant: bool = _modelopt(
        False,
        "Quantize the key/value cache by ModelOpt.",
        refused=flag_messages.MODELOPT,
    )
    finetune_hf_dataset: str | None = _modelopt(
        None, "Data set on the Hugging Face hub to tune on.", refused=flag_messages.HUB_DATA
    )
    finetune_data_split: str = _modelopt(
        "train", "Split of --finetune-hf-dataset.", refused=flag_messages.HUB_DATA
    )
    ict_head_size: int | None = _ict(None, "Width of the retriever's embeddings in ICT.")
    biencoder_projection_dim: int = _ict(
        0, "Width of a projection behind the retriever; 0 means none."
    )
    biencoder_shared_query_context_model: bool = _ict(
        False, "Embed queries and contexts with one model."
    )
    ict_load: str | None = _ict(None, "Directory of an ICT checkpoint.")
    bert_load: str | None = _ict(None, "Directory of a BERT checkpoint that ICT starts from.")
    titles_data_path: str | None = _ict(None, "Data prefix of document titles.")
    query_in_block_prob: float = _ict(0.1, "Probability that a query stays in its block.")
    use_one_sent_docs: bool = _ict(False, "Use documents of a single sentence too.")
    evidence_data_path: str | None = _ict(None, "File of evidence passages.")
    retriever_report_topk_accuracies: tuple[int, ...] = _ict(
        (), "Values of k whose retrieval accuracy is reported.", nargs="+"
    )
    retriever_score_scaling: bool = _ict(False, "Divide retrieval scores by the root of the width.")
    block_data_path: str | None = _ict(None, "File of embedded blocks.")
    embedding_path: str | None = _ict(None, "File of embeddings for open retrieval.")
    indexer_batch_size: int = _ict(128, "Samples in a batch while blocks are embedded.")
    indexer_log_interval: int = _ict(1000, "Batches between lines while blocks are embedded.")
    swin_backbone_type: str = _vision(
        "tiny", "Size of a Swin model.", choices=("tiny", "base", "h3")
    )
    mask_type: str = _vision(
        "random", "How image patches are hidden for inpainting.", choices=("random", "row")
    )
    mask_factor: float = _vision(1.0, "Size factor of hidden patches.")
    iter_per_epoch: int = _vision(1250, "Steps that count as one epoch of images.")
    dino_local_img_size: int = _vision(96, "Side of DINO's local crops in pixels.")
    dino_local_crops_number: int = _vision(10, "Local crops of each image in DINO.")
    dino_head_hidden_size: int = _vision(2048, "Width of DINO's head.")
    dino_bottleneck_size: int = _vision(256, "Width of the bottleneck in DINO's head.")
    dino_freeze_last_layer: float = _vision(1.0, "Epochs during which DINO's last layer is frozen.")
    dino_norm_last_layer: bool = _vision(False, "Normalize DINO's last layer.")
    dino_warmup_teacher_temp: float = _vision(0.04, "First temperature of DINO's teacher.")
    dino_teacher_temp: float = _vision(0.07, "Temperature of DINO's teacher after warm-up.")
    dino_warmup_teacher_temp_epochs: int = _vision(
        30, "Epochs over which the teacher's temperature rises."
    )
    retro_project_dir: str | None = _retro(
        None, "Directory of a retrieval project.", refused=flag_messages.RETRO
    )
    retro_add_retriever: bool = _retro(
        False, "Add retrieval to the model.", refused=flag_messages.RETRO
    )
    retro_cyclic_train_iters: int | None = _retro_detail(
        None, "Steps after which retrieval data repeats."
    )
    retro_encoder_layers: int = _retro_detail(2, "Layers of the encoder of neighbours.")
    retro_encoder_hidden_dropout: float = _retro_detail(
        0.1, "Hidden dropout of the encoder of neighbours."
    )
    retro_encoder_attention_dropout: float = _retro_detail(
        0.1, "Attention dropout of the encoder of neighbours."
    )
    retro_num_neighbors: int = _retro_detail(2, "Neighbours that are retrieved for each chunk.")
    retro_num_retrieved_chunks: int = _retro_detail(2, "Chunks of each neighbour.")
    retro_attention_gate: float = _retro_detail(1.0, "Gate of attention to neighbours.")
    retro_verify_neighbor_count: bool = _retro_detail(
        True, "Accept chunks with fewer neighbours.", flag="--retro-no-verify-neighbor-count"
    )
