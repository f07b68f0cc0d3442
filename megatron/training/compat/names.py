"""Import paths of Megatron-LM's training package whose names are defined elsewhere in it."""

NAMES = """
training <- core.num_microbatches_calculator: get_num_microbatches
training <- training.compat.global_vars: set_args set_global_variables
training <- training.compat.train_loop: build_train_valid_test_data_iterators
    get_optimizer_param_scheduler setup_model_and_optimizer
training <- training.startup_log: print_datetime
training.activations <- core.activations: fast_gelu quick_gelu squared_relu
training.arguments <- training.arguments.parser: add_megatron_arguments
training.async_utils <- training.compat.checkpointing: maybe_finalize_async_save
training.checkpointing <- training.compat.checkpointing: CheckpointType _get_checkpoint_format
    find_checkpoint_rank_0 get_load_checkpoint_path_by_args isfile read_metadata
training.initialize <- training.compat.global_vars: set_global_variables
training.initialize <- training.compat.utils: _initialize_tp_communicators
training.theoretical_memory_usage <- training.compat.arguments: report_theoretical_memory
training.vocab_utils <- training.tokenizer.tokenizer: calculate_padded_vocab_size=pad_vocab_size
"""
