# Variables that all launchers of this folder share, in Megatron-LM's spelling.
#
#   $1             name of the model; its Hugging Face name stands in for HF_MODEL_CKPT
#   HF_MODEL_CKPT  Hugging Face folder, or name on the hub (HF_TOKEN is read by its library)
#   MLM_MODEL_LOAD (or MLM_MODEL_CKPT), MLM_MODEL_SAVE   checkpoints to read and to write
#   TP PP EP ETP DP  parallel sizes; DP: data parallelism. All are 1 if not given
#   MLM_EXTRA_ARGS further flags
#   LAUNCH_SCRIPT  command that starts the ranks; torchrun by default
# The folder or the checkpoint describes the architecture: there is no file of model arguments.
MLM_MODEL_CFG=${1:-}
HF_MODEL_CKPT=${HF_MODEL_CKPT:-$MLM_MODEL_CFG}
MLM_MODEL_LOAD=${MLM_MODEL_LOAD:-${MLM_MODEL_CKPT:-}}
MLM_WORK_DIR=${MLM_WORK_DIR:-/tmp/megatron_workspace}
TP=${TP:-1}
PP=${PP:-1}
EP=${EP:-1}
ETP=${ETP:-$TP}
ranks=$((TP * PP * ${DP:-1}))
dense=$((ETP * EP * PP))
if ((dense > ranks)); then ranks=$dense; fi
read -ra launch <<<"${LAUNCH_SCRIPT:-torchrun --nproc_per_node=$ranks}"
read -ra extra <<<"${MLM_EXTRA_ARGS:-}"
layout=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP"
)
if ((EP > 1)); then layout+=(--expert-tensor-parallel-size "$ETP"); fi
# The model to start from: a checkpoint if one is given, else the Hugging Face folder.
if [[ -n $MLM_MODEL_LOAD ]]; then
    model=(--load "$MLM_MODEL_LOAD")
elif [[ -n $HF_MODEL_CKPT ]]; then
    model=(--pretrained-model-path "$HF_MODEL_CKPT")
else
    echo "set HF_MODEL_CKPT to a Hugging Face folder, or MLM_MODEL_LOAD to a checkpoint" >&2
    exit 2
fi
here=$(dirname "${BASH_SOURCE[0]}")/..
name=$(basename "${MLM_MODEL_CFG:-${HF_MODEL_CKPT:-$MLM_MODEL_LOAD}}")

# start PROGRAM FLAGS...: start a program of this folder with the layout and MLM_EXTRA_ARGS.
start() {
    exec "${launch[@]}" "$here/$1.py" "${layout[@]}" "${@:2}" "${extra[@]}"
}
