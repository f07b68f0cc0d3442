"""Import paths of Megatron Core whose names are defined elsewhere in ``megatron.core``."""

NAMES = """
# -- Configuration, data and helpers
core <- core.distributed: DistributedDataParallel
core <- core.compat.config: __version__
core.config <- core.compat.config: set_experimental_flag is_experimental_enabled
core.datasets.megatron_tokenizer <- training.tokenizer.base: MegatronTokenizer
    MegatronLegacyTokenizer=MegatronTokenizer
core.datasets.retro.config <- core.datasets.retro.index: RetroGPTChunkDatasets
core.datasets.retro.config <- core.datasets.retro.project: RetroPreprocessingConfig
core.datasets.retro.query.multi_split_gpt_dataset <- core.datasets.retro.retro_dataset:
    MultiSplitGPTDataset MultiSplitGPTDatasetConfig
core.datasets.retro.query.retro_dataset <- core.datasets.retro.retro_dataset: RetroDataset
    get_retro_datasets
core.energy_monitor <- core.diagnostics.energy: EnergyMonitor
core.fp4_utils <- core.compat.config: get_fp4_context
core.fp8_utils <- core.compat.config: FP8_TENSOR_CLASS HAVE_TE_FP8_TENSOR_CLASS get_fp8_context
    correct_amax_history_if_needed
core.full_cuda_graph <- core.compat.config: FullCudaGraphWrapper
core.jit <- core.compat.config: jit_fuser disable_jit_fuser
core.msc_utils <- core.compat.config: MultiStorageClientFeature open_file
core.num_microbatches_calculator <- core.num_microbatches_calculator:
    ConstantNumMicroBatchesCalculator=NumMicroBatchesCalculator
core.package_info <- core.compat.config: __version__
core.quantization.utils <- core.quantization.quant_config: get_quant_config_or_none
    load_quantization_recipe kitchen_quantization_recipe_config
# -- Export
core.export.data_type <- core.export.trtllm.trtllm_layers: DataType
core.export.export_config <- core.export.trtllm.trtllm_layers: ExportConfig
core.export.model_type <- core.export.trtllm.trtllm_layers: ModelType
core.export.trtllm.engine_builder.trtllm_engine_builder <- core.export.trtllm.trtllm_helper:
    TRTLLMEngineBuilder
core.export.trtllm.model_to_trllm_mapping.default_conversion_dict <-
    core.export.trtllm.trtllm_layers: DEFAULT_CONVERSION_DICT NEMOTRON_NAS_CONVERSION_DICT
core.export.trtllm.trt_model_config <- core.export.trtllm.trtllm_helper: TRT_MODEL_CONFIG
core.export.trtllm.trt_model_type <- core.export.trtllm.trtllm_layers: TRT_MODEL_TYPE_STRING
core.export.trtllm.trtllm_weights_converter.distributed_trtllm_model_weights_converter <-
    core.export.trtllm.trtllm_weights: DistributedTRTLLMModelWeightsConverter str_dtype_to_torch
core.export.trtllm.trtllm_weights_converter.single_device_trtllm_model_weights_converter <-
    core.export.trtllm.trtllm_weights: SingleDeviceTRTLLMModelWeightsConverter pad_vocab_size
    str_dtype_to_torch
core.export.trtllm.trtllm_weights_converter.utils <- core.export.trtllm.trtllm_weights:
    is_gated_activation
# -- Checkpoints
core.dist_checkpointing <- core.dist_checkpointing.serialization: load_plain_tensors
    load_tensors_metadata load_sharded_metadata check_is_distributed_checkpoint
core.dist_checkpointing.core <- core.config.errors: CheckpointingException=CheckpointError
core.dist_checkpointing.core <- core.dist_checkpointing.serialization:
    check_is_distributed_checkpoint
core.dist_checkpointing.dict_utils <- core.compat.checkpoint: dict_list_map_inplace diff
    extract_matching_values
core.dist_checkpointing.dict_utils <- core.dist_checkpointing.mapping: nested_values=leaves
    dict_list_map_outplace=map_leaves
core.dist_checkpointing.serialization <- core.compat.checkpoint: get_default_load_sharded_strategy
    get_default_save_sharded_strategy
core.dist_checkpointing.serialization <- core.dist_checkpointing.mapping: CommonStateDict
core.dist_checkpointing.serialization <- core.config.errors: CheckpointingException=CheckpointError
core.dist_checkpointing.strategies.async_utils <- core.compat.checkpoint: _disable_gc=disable_gc
core.dist_checkpointing.strategies.async_utils <- core.dist_checkpointing.async_requests:
    AsyncCallsQueue AsyncRequest
core.dist_checkpointing.strategies.base <- core.compat.checkpoint: async_calls SaveShardedStrategy
    AsyncSaveShardedStrategy=SaveShardedStrategy LoadShardedStrategy
core.dist_checkpointing.strategies.common <- core.dist_checkpointing.manifest:
    COMMON_STATE_FNAME=COMMON_FILE
core.dist_checkpointing.strategies.filesystem_async <- core.compat.checkpoint: FileSystemWriterAsync
    _process_memory=process_memory _results_queue=NO_RESULTS
core.dist_checkpointing.strategies.fully_parallel <- core.compat.checkpoint:
    FullyParallelLoadStrategyWrapper FullyParallelSaveStrategyWrapper
core.dist_checkpointing.strategies.tensorstore <- core.compat.checkpoint:
    TensorStoreLoadShardedStrategy
core.dist_checkpointing.strategies.torch <- core.compat.checkpoint: TorchDistLoadShardedStrategy
    TorchDistSaveShardedStrategy get_async_strategy
core.dist_checkpointing.validation <- core.compat.checkpoint: verify_checkpoint_and_load_strategy
core.dist_checkpointing.utils <- core.compat.checkpoint:
    _clean_metadata_for_serialization=clean_metadata_for_serialization
core.dist_checkpointing.utils <- core.dist_checkpointing.mapping: add_prefix_for_sharding
    apply_prefix_mapping replace_prefix_for_sharding
core.transformer.utils <- core.dist_checkpointing.module_state:
    _get_extra_state_offsets=extra_state_offsets ensure_metadata_has_dp_cp_group
    make_sharded_object_for_checkpoint make_sharded_tensors_for_checkpoint
    sharded_state_dict_default
core.transformer.utils <- core.activations: openai_gelu
core.transformer.utils <- core.transformer.attention_masks: is_layer_window_attention
core.transformer.utils <- core.compat.models: attention_mask_func get_linear_layer
# -- Training, optimizers and data parallelism
core.distributed <- core.compat.distributed: TorchFullyShardedDataParallel
core.distributed.finalize_model_grads <- core.compat.distributed: _flatten_dense_tensors
    _get_main_grad_attr _reshard_if_dtensor _unflatten_dense_tensors _unshard_if_dtensor
core.distributed.finalize_model_grads <- core.utils: get_attr_wrapped_model
core.distributed.fsdp.mcore_fsdp_adapter <- core.distributed.fsdp: FullyShardedDataParallel
    FullyShardedDataParallelV1=FullyShardedDataParallel
    FullyShardedDataParallelV2=FullyShardedDataParallel
core.distributed.fsdp.src.megatron_fsdp <- core.distributed.fsdp:
    MegatronFSDP=FullyShardedDataParallel
core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp <- core.distributed.fsdp:
    MegatronFSDP=FullyShardedDataParallel
core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor <- core.compat.distributed:
    gather_uneven_dtensor_to_full_tensor preprocess_state_dict_for_uneven_dtensor
    uneven_dtensor_to_full_tensor=gather_uneven_dtensor_to_full_tensor
core.optimizer <- core.compat.optimizer: ChainedOptimizer param_group_identifier_keys
core.optimizer <- core.optimizer.optimizer_config: AdamOptimizerConfig=OptimizerConfig
    SGDOptimizerConfig=OptimizerConfig
core.optimizer <- core.optimizer.param_groups: ParamGroupOverride ParamKey ParamPredicate
    get_standard_config_overrides
core.optimizer.cpu_offloading.hybrid_optimizer <- core.compat.optimizer: HybridDeviceOptimizer
core.optimizer.layer_wise_optimizer <- core.compat.optimizer: LayerWiseDistributedOptimizer
core.optimizer.muon <- core.optimizer: get_megatron_muon_optimizer=get_megatron_optimizer
core.optimizer.optimizer <- core.compat.optimizer: ChainedOptimizer ProxyDict
    param_group_identifier_keys
core.optimizer.qk_clip <- core.compat.optimizer: clip_qk
core.optimizer_param_scheduler <- core.optimizer.param_groups: ParamGroupOverride
# -- Models, inference and packages before Megatron Core
core.models.common.embeddings <- core.compat.models: YarnRotaryEmbedding
core.models.common.embeddings <- core.models.common.embeddings.rope_utils: apply_rotary_pos_emb
core.models.common.embeddings <- core.transformer.rope: _yarn_get_mscale=yarn_mscale
core.models.common.embeddings.rotary_pos_embedding <- core.models.common.embeddings.rope_utils:
    _apply_rotary_pos_emb_bshd _apply_rotary_pos_emb_thd _rotate_half apply_rotary_pos_emb
    get_pos_emb_on_this_cp_rank
core.models.common.embeddings.yarn_rotary_pos_embedding <- core.compat.models: YarnRotaryEmbedding
    _yarn_get_concentration_factor_from_config=yarn_factor_of_config
core.models.common.embeddings.yarn_rotary_pos_embedding <- core.transformer.rope:
    _yarn_get_mscale=yarn_mscale
core.models.huggingface <- core.compat.models: HuggingFaceModule
core.models.huggingface <- core.models.huggingface.module: get_hf_model_type
core.models.huggingface.module <- core.compat.models: HuggingFaceModule
core.models.hybrid.hybrid_block <- core.ssm.mamba_block: HybridStack=MambaStack
    HybridStackSubmodules=MambaStackSubmodules
core.models.hybrid.hybrid_layer_allocation <- core.ssm.mamba_hybrid_layer_allocation: Symbols
core.models.hybrid.hybrid_layer_specs <- core.models.mamba.mamba_layer_specs:
    hybrid_stack_spec=mamba_stack_spec hybrid_inference_stack_spec=mamba_stack_spec
core.models.hybrid.hybrid_model <- core.compat.models: HybridModel
core.models.retro.base_attention <- core.models.retro.attention: BaseRetroCrossAttention
core.models.retro.decoder_attention <- core.models.retro.attention: RetroDecoderCrossAttention
core.models.retro.decoder_spec <- core.models.retro.attention: get_retro_decoder_block_spec
core.models.retro.encoder_attention <- core.models.retro.attention: RetroEncoderCrossAttention
core.models.retro.utils <- core.compat.models: get_all_true_mask
core.models.retro.utils <- core.datasets.retro.project: get_config_path get_gpt_data_dir
core.models.multimodal.llava_spec <- core.models.gpt.gpt_layer_specs:
    decoder_model_with_local_default_spec=get_gpt_layer_local_spec
    decoder_model_with_transformer_engine_default_spec=get_gpt_layer_with_transformer_engine_spec
legacy.model.enums <- core.enums: AttnMaskType AttnType LayerType
legacy.model.fused_bias_gelu <- core.fusions.fused_bias_gelu: bias_gelu_impl
legacy.model.fused_softmax <- core.fusions.fused_softmax: FusedScaleMaskSoftmax
legacy.model.module <- core.transformer.module: MegatronModule
legacy.model.utils <- core.activations: openai_gelu
legacy.model.utils <- core.compat.models: attention_mask_func erf_gelu get_linear_layer get_norm
legacy.model.utils <- core.utils: init_method_normal scaled_init_method_normal
# -- Transformer layers
core.extensions.transformer_engine <- core.compat.transformer: get_cpu_offload_context te_checkpoint
    Fp8Padding Fp8Unpadding HAVE_TE TEFusedMLP _get_extra_te_kwargs set_save_original_input
    te_general_gemm
core.extensions.transformer_engine <- core.models.common.embeddings.rope_utils:
    fused_apply_rotary_pos_emb fused_apply_rotary_pos_emb_thd
core.extensions.transformer_engine <- core.transformer.moe.experts: TEGroupedLinear
    TEColumnParallelGroupedLinear TERowParallelGroupedLinear
core.extensions.transformer_engine <- core.tensor_parallel.random:
    TECudaRNGStatesTracker=RNGStatesTracker
core.extensions.transformer_engine_spec_provider <- core.models.backends: TESpecProvider
core.models.gpt.experimental_attention_variant_module_specs <- core.compat.models: DSAIndexer
core.models.gpt.gpt_layer_specs <- core.models.gpt.gpt_layer_specs:
    _get_mlp_module_spec=get_mlp_module_spec
core.models.gpt.gpt_model <- core.enums: ModelType
core.models.gpt.moe_module_specs <- core.models.gpt.gpt_layer_specs:
    get_moe_module_spec=get_mlp_module_spec
    get_moe_module_spec_for_backend=get_mlp_module_spec_for_backend
core.models.gpt.moe_module_specs <- core.transformer.mlp: MLPSubmodules
core.transformer <- core.transformer.transformer_config: MLATransformerConfig
core.transformer <- core.transformer.transformer_layer: TransformerLayerSubmodules
core.transformer.attention <- core.compat.transformer: HAVE_FA3 Optional Tuple Union
core.transformer.attention <- core.compat.utils: is_fa_min_version
core.transformer.attention <- core.inference.v014.contexts: BaseInferenceContext
core.transformer.attention <- core.utils: nvtx_range_pop nvtx_range_push
core.transformer.cuda_graphs <- core.compat.transformer: CudaGraphManager TECudaGraphHelper
core.transformer.custom_layers.transformer_engine <- core.compat.transformer:
    get_cpu_offload_context te_checkpoint
core.transformer.custom_layers.transformer_engine <- core.extensions.transformer_engine:
    SplitAlongDim TEColumnParallelLinear TEDelayedScaling TEDotProductAttention
    TELayerNormColumnParallelLinear TELinear TENorm TERowParallelLinear
core.transformer.custom_layers.transformer_engine <- core.transformer.moe.experts:
    TEColumnParallelGroupedLinear TERowParallelGroupedLinear
core.transformer.mlp <- core.dist_checkpointing.module_state: apply_swiglu_sharded_factory
core.transformer.multi_latent_attention <- core.models.common.embeddings.rope_utils:
    apply_rotary_pos_emb
core.transformer.multi_latent_attention <- core.utils: deprecate_inference_params
core.transformer.multi_token_prediction <- core.aux_loss: MTPLossAutoScaler=MoEAuxLossAutoScaler
core.transformer.multi_token_prediction <- core.compat.moe: MTPLossLoggingHelper
core.transformer.multi_token_prediction <- core.compat.transformer: get_mtp_layer_offset
    get_mtp_num_layers_to_build tie_output_layer_state_dict tie_word_embeddings_state_dict
core.transformer.multi_token_prediction <- core.models.gpt.gpt_layer_specs: get_mtp_layer_spec
    get_mtp_layer_spec_for_backend
core.transformer.torch_layer_norm <- core.transformer.norms: WrappedTorchLayerNorm=WrappedTorchNorm
core.transformer.enums <- core.enums: AttnBackend AttnMaskType AttnType CudaGraphScope
    LayerType ModelType
core.transformer.torch_norm <- core.transformer.norms: L2Norm WrappedTorchNorm
# Projects take what a copied method needs by `from ... import *`.
core.transformer.transformer_block <- core.compat.config: get_fp8_context
core.transformer.transformer_block <- core.compat.transformer: Optional Union te_checkpoint
core.transformer.transformer_block <- core.compat.utils: WrappedTensor make_viewless_tensor
core.transformer.transformer_block <- core.enums: Fp8Recipe
core.transformer.transformer_block <- core.inference.v014.contexts: BaseInferenceContext
core.transformer.transformer_block <- core.packed_seq_params: PackedSeqParams
core.transformer.transformer_block <- core.parallel.parallel_state: parallel_state=
core.transformer.transformer_block <- core.tensor_parallel: tensor_parallel=
core.transformer.transformer_block <- core.transformer.layer_layout: get_num_layers_to_build
    get_transformer_layer_offset
core.transformer.transformer_block <- core.utils: deprecate_inference_params
core.transformer.transformer_layer <- core.transformer.layer_layout: get_transformer_layer_offset
# -- Experts, fusions and state-space layers
core.fusions.fused_bias_dropout <- core.compat.fusions: bias_dropout_add_fused_inference
    bias_dropout_add_fused_train
core.fusions.fused_bias_geglu <- core.activations: quick_gelu
core.fusions.fused_bias_geglu <- core.compat.fusions: bias_geglu_impl
core.fusions.fused_bias_gelu <- core.compat.fusions: bias_gelu bias_gelu_impl
core.fusions.fused_bias_swiglu <- core.compat.fusions: bias_swiglu bias_swiglu_impl
    weighted_bias_swiglu_impl
core.fusions.fused_cross_entropy <- core.compat.fusions: calculate_logits_max
    fused_vocab_parallel_cross_entropy
core.fusions.fused_layer_norm <- core.transformer.norms: FusedLayerNorm
core.fusions.fused_softmax <- core.compat.fusions: FusedScaleMaskSoftmax
core.ssm.gated_delta_net <- core.compat.models: GatedDeltaNetSubmodules
core.ssm.mamba_context_parallel <- core.parallel.context_parallel_partition:
    _undo_attention_load_balancing=undo_load_balancing
core.ssm.mamba_mixer <- core.dist_checkpointing.mapping: _split_tensor_factory=split_factory
core.ssm.mlp_layer <- core.transformer.transformer_layer: MLPLayer=TransformerLayer
core.transformer.moe.experts <- core.compat.moe: GroupedMLP
core.transformer.moe.fused_a2a <- core.transformer.moe.deep_ep: fused_combine get_buffer
    get_hidden_bytes
core.transformer.moe.grouped_gemm_util <- core.compat.moe: assert_grouped_gemm_is_available
    grouped_gemm_is_available ops
core.transformer.moe.moe_layer <- core.tensor_parallel.random: te_checkpoint=checkpoint
core.transformer.moe.moe_utils <- core.aux_loss: MoEAuxLossAutoScaler
core.transformer.moe.moe_utils <- core.compat.moe: RouterGatingLinearFunction
    apply_random_logits apply_router_token_dropping clear_aux_losses_tracker
    compute_routing_scores_for_aux_loss get_capacity get_moe_layer_wise_logging_tracker
    group_limited_topk permute reduce_aux_losses_tracker_across_ranks save_to_aux_losses_tracker
    sort_chunks_by_idxs switch_load_balancing_loss_func topk_routing_with_score_function
    track_moe_metrics unpermute z_loss_func
core.transformer.moe.moe_utils <- core.parallel.default_groups:
    get_default_model_comm_pgs=default_groups get_default_pg_collection=default_groups
core.transformer.moe.moe_utils <- core.transformer.moe.routing: sinkhorn
core.transformer.moe.router <- core.aux_loss: MoEAuxLossAutoScaler
core.transformer.moe.router <- core.transformer.moe.router: Router=TopKRouter
core.transformer.moe.token_dispatcher <- core.transformer.moe.token_dispatcher:
    MoEAllGatherTokenDispatcher=AllGatherDispatcher MoEAlltoAllTokenDispatcher=AllToAllDispatcher
    MoEFlexTokenDispatcher=AllToAllDispatcher MoETokenDispatcher=TokenDispatcher
# -- Parallelism
core.parallel.parallel_state <- core.compat.parallel: RankGenerator
    generate_masked_orthogonal_rank_groups create_group get_nccl_options update_pg_timeout
    get_global_memory_buffer destroy_global_memory_buffer
    _set_global_memory_buffer=set_global_memory_buffer
core.pipeline_parallel.p2p_communication <- core.compat.pipeline: P2PCommunicator recv_forward
    send_forward _batched_p2p_ops
core.pipeline_parallel.schedules <- core.compat.pipeline: get_schedule_table get_tensor_shapes
core.pipeline_parallel.utils <- core.compat.pipeline: is_vp_first_stage is_vp_last_stage
core.pipeline_parallel.utils <- core.inference.communication_utils:
    is_pp_first_stage=is_pipeline_first_stage is_pp_last_stage=is_pipeline_last_stage
core.parallel.process_groups_config <- core.parallel.process_groups_config:
    ModelCommProcessGroups=ProcessGroupCollection GradCommProcessGroups=ProcessGroupCollection
    GradFinalizeProcessGroups=ProcessGroupCollection
core.tensor_parallel <- core.compat.tensor_parallel: copy_tensor_model_parallel_attributes
    get_data_parallel_rng_tracker_name get_expert_parallel_rng_tracker_name
    linear_with_grad_accumulation_and_async_allreduce param_is_not_tensor_parallel_duplicate
    set_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes
    gather_split_1d_tensor split_tensor_along_last_dim split_tensor_into_1d_equal_chunks
core.tensor_parallel.layers <- core.compat.tensor_parallel: copy_tensor_model_parallel_attributes
    param_is_not_tensor_parallel_duplicate set_tensor_model_parallel_attributes
    set_defaults_if_not_set_tensor_model_parallel_attributes linear_with_frozen_weight
    linear_with_grad_accumulation_and_async_allreduce _initialize_affine_weight_cpu
    _initialize_affine_weight_gpu LinearWithGradAccumulationAndAsyncCommunication
core.tensor_parallel.random <- core.compat.tensor_parallel: get_data_parallel_rng_tracker_name
    get_expert_parallel_rng_tracker_name CheckpointFunction detach_variable gather_split_1d_tensor
    _fork_rng=fork_rng
core.tensor_parallel.random <- core.compat.utils: safely_set_viewless_tensor_data
core.tensor_parallel.random <- core.tensor_parallel.random: _set_all_rng_states=set_all_rng_states
    _get_all_rng_states=get_all_rng_states
core.tensor_parallel.utils <- core.compat.tensor_parallel: VocabUtility gather_split_1d_tensor
    split_tensor_along_last_dim split_tensor_into_1d_equal_chunks
core.tensor_parallel.utils <- core.utils: divide
core.utils <- core.dist_checkpointing.module_state: make_sharded_tensor_for_checkpoint
    make_tp_sharded_tensor_for_checkpoint
core.utils <- core.compat.utils: WrappedTensor MakeViewlessTensor make_viewless_tensor unwrap_model
    safely_set_viewless_tensor_data get_pg_rank get_pg_size to_local_if_dtensor
    get_tensor_model_parallel_group_if_none get_data_parallel_group_if_dtensor
    check_param_hashes_across_dp_replicas init_method_normal scaled_init_method_normal
    get_torch_version get_te_version get_fa_version is_torch_min_version is_te_min_version
    is_fa_min_version drain_embedding_wgrad_compute local_multi_tensor_applier
    local_multi_tensor_l2_norm
core.utils <- core.compat.parallel: GlobalMemoryBuffer
core.utils <- core.compat.config: ExperimentalNotEnabledError experimental_cls experimental_fn
# -- Generation, whose classes with Megatron Core's names are in one package
core.inference.async_stream = core.inference.v014.requests
core.inference.common_inference_params <- core.inference.sampling_params:
    CommonInferenceParams=SamplingParams
core.inference.contexts <- core.inference.v014.contexts: BaseInferenceContext
    DynamicInferenceContext StaticInferenceContext
core.inference.contexts.base_context = core.inference.v014.contexts
core.inference.contexts.dynamic_context = core.inference.v014.contexts
core.inference_params = core.inference.v014.contexts
core.inference.contexts.inference_params = core.inference.v014.contexts
core.inference.contexts.static_context = core.inference.v014.contexts
core.inference.engines <- core.inference.v014.engines: AbstractEngine DynamicInferenceEngine
    StaticInferenceEngine
core.inference.engines.abstract_engine = core.inference.v014.engines
core.inference.engines.dynamic_engine = core.inference.v014.engines
core.inference.engines.mcore_engine <- core.inference.v014.engines:
    MCoreEngine=StaticInferenceEngine
core.inference.engines.static_engine = core.inference.v014.engines
core.inference.inference_request = core.inference.v014.requests
core.inference.model_inference_wrappers.abstract_model_inference_wrapper = core.inference.v014.wrappers
core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper = core.inference.v014.wrappers
core.inference.model_inference_wrappers.inference_wrapper_config = core.inference.v014.contexts
core.inference.model_inference_wrappers.multimodal.vlm_inference_wrapper = core.inference.v014.wrappers
core.inference.model_inference_wrappers.t5.t5_inference_wrapper = core.inference.v014.wrappers
core.inference.scheduler = core.inference.v014.requests
core.inference.text_generation_controllers.encoder_decoder_text_generation_controller = core.inference.v014.controllers
core.inference.text_generation_controllers.simple_text_generation_controller <-
    core.inference.v014.controllers: SimpleTextGenerationController=TextGenerationController
core.inference.text_generation_controllers.text_generation_controller = core.inference.v014.controllers
core.inference.text_generation_controllers.vlm_text_generation_controller = core.inference.v014.controllers
# -- Modules that are in a package here
core.hyper_comm_grid = core.parallel.hyper_comm_grid
core.parallel_state = core.parallel.parallel_state
core.process_groups_config = core.parallel.process_groups_config
core.rerun_state_machine <- core.rerun.results: COMPARISON_MATCH COMPARISON_MISMATCH Call Caller
    QuickStats RerunDiagnostic RerunErrorInjector RerunMode RerunState RerunValidationStatus
core.rerun_state_machine <- core.rerun.state_machine: EXIT_CODE_FAILED_ON_RESULT_VALIDATION
    EXIT_CODE_RESUME_TO_DISAMBIGUATE RerunDataIterator RerunStateMachine
    destroy_rerun_state_machine get_rerun_state_machine initialize_rerun_state_machine
core.timers = core.diagnostics.timers
"""
