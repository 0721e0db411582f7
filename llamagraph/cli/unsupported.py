"""Options of llama.cpp's programs that llamagraph does not have, and what to use instead."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from llamagraph.cli.groups import LineError

NO_SPLIT = "a model runs on one GPU or on the CPU, whole; choose with --device or -ngl"
NO_DRAFT = "there is no speculative decoding; leave it out"
NO_MEDIA = "there are text models alone; leave it out"
ONE_SERVER = "there is no server and one sequence; leave it out"
THREADS = "set the number of CPU threads with -t; there is no finer control"
FETCH = "fetch models with -hf USER/MODEL[:QUANT], or give a file with -m"
KV_PLACE = "the KV cache is always where the model is; leave it out"
MEMORY = "memory is checked before loading; choose the context with -c"
VECTORS = "there are no control vectors; leave it out"
ALWAYS = "nothing needs it here; leave it out"

Table = tuple[tuple[str, str], ...]  # names, separated by spaces, and the advice

UNSUPPORTED: Table = (
    ("-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn "
     "-sm --split-mode -ts --tensor-split -mg --main-gpu --rpc", NO_SPLIT),
    ("-kvo --kv-offload -nkvo --no-kv-offload", KV_PLACE),
    ("-fitt --fit-target -fitc --fit-ctx", MEMORY),
    ("-cl --cache-list", "models lie in the cache folder, see LLAMAGRAPH_CACHE, and in Hugging "
                         "Face's: huggingface-cli scan-cache"),
    ("--completion-bash", "_LLAMAGRAPH_COMPLETE=bash_source llamagraph prints it"),
    ("-tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll "
     "-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch "
     "--numa", THREADS),
    ("--swa-full", "a sliding window keeps what it can see; leave it out"),
    ("-bf --binary-file", "the prompt is text: -f FILE"),
    ("--repack -nr --no-repack --no-host -dt --defrag-thold --op-offload --no-op-offload "
     "-lzm --lazy-mode -bs --backend-sampling --log-prefix --no-log-prefix --log-timestamps "
     "--no-log-timestamps --mmap --no-mmap --mlock", ALWAYS),
    ("-np --parallel --server-base -ctxcp --ctx-checkpoints --swa-checkpoints -cram --cache-ram",
     ONE_SERVER),
    ("--control-vector --control-vector-scaled --control-vector-layer-range", VECTORS),
    ("-mu --model-url -dr --docker-repo --gpt-oss-20b-default --gpt-oss-120b-default "
     "--vision-gemma-4b-default --vision-gemma-12b-default", FETCH),
    ("-hft --hf-token", "set HF_TOKEN, or log in with huggingface-cli login"),
    ("--log-disable", "-lv 1 leaves errors alone on stderr, -lv 0 nothing but them"),
    ("--log-jsonl --no-log-jsonl", "--json and --jsonl put the answer into JSON on stdout"),
    ("--verbose-prompt", "--json lists the prompt's tokens"),
    ("-ptc --print-token-count", "-v counts them at the end"),
    ("-o --output --output-file", "the answer goes to stdout: > FILE"),
    ("--log-prompts-dir", "--json has the prompt's tokens"),
    ("--reasoning-format --reasoning-preserve --no-reasoning-preserve --skip-chat-parsing "
     "--no-skip-chat-parsing", "thinking is text of the answer like any other; see --reasoning"),
    ("--reasoning-effort", "--chat-template-kwargs '{\"reasoning_effort\": \"low\"}'"),
    ("--reasoning-budget-message", "--reasoning-budget ends thinking without a message"),
    ("--in-prefix-bos", "BOS is where the model wants it; leave it out"),
    ("-gan --grp-attn-n -gaw --grp-attn-w", "extend the context with --rope-scaling yarn"),
    ("-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
     "--no-mmproj-offload -mmdev --mmproj-device --image --audio --video --image-min-tokens "
     "--image-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir", NO_MEDIA),
    ("-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf "
     "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft "
     "--spec-draft-type-v -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
     "--spec-draft-threads-batch -otd --override-tensor-draft --spec-draft-override-tensor "
     "-ncmoed --n-cpu-moe-draft --spec-draft-ncmoe --spec-draft-n-cpu-moe --spec-draft-n-max "
     "--spec-draft-n-min --spec-synth-len --spec-synth-rates --draft-p-split "
     "--spec-draft-p-split --draft-p-min --spec-draft-p-min --spec-draft-backend-sampling "
     "--no-spec-draft-backend-sampling -devd --device-draft --spec-draft-device -ngld "
     "--gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl --spec-type "
     "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match "
     "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
     "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits "
     "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits "
     "--draft --draft-n --draft-max --draft-min --draft-n-min --spec-default "
     "--spec-draft-cpu-mask --spec-draft-cpu-range --spec-draft-cpu-strict --spec-draft-prio "
     "--spec-draft-poll --spec-draft-cpu-mask-batch --spec-draft-cpu-strict-batch "
     "--spec-draft-prio-batch --spec-draft-poll-batch --spec-draft-cpu-moe", NO_DRAFT),
)

UNSUPPORTED_IN_BENCH: Table = (  # of llama-bench
    ("-ngl --n-gpu-layers", "a model runs on one GPU or on the CPU, whole; choose with -dev"),
    ("-ncmoe --n-cpu-moe -sm --split-mode -mg --main-gpu -ts --tensor-split -ot --override-tensor "
     "-rpc --rpc", NO_SPLIT.replace("--device or -ngl", "-dev")),
    ("-nkvo --no-kv-offload", KV_PLACE), ("-fitt --fit-target -fitc --fit-ctx", MEMORY),
    ("-C --cpu-mask --cpu-strict --poll --prio --numa", THREADS),
    ("-hff --hf-file -hft --hf-token", FETCH), ("-v --verbose", "--progress says what it does"),
    ("-embd --embeddings", "logits are what is computed; leave it out"),
    ("--list-devices", "llamagraph run --list-devices"),
    ("-lm --load-mode -lzm --lazy-mode -mmp --mmap -nopo --no-op-offload --no-host -rpk --repack",
     ALWAYS),
)


def advice(table: Table = UNSUPPORTED) -> Mapping[str, str]:
    """What to use in place of each option."""
    return {name: text for names, text in table for name in names.split()}


def refuse(table: Table) -> Callable[[Any], Any]:
    """A command that answers each of these options with one line, with or without a value."""

    def decorate(command: Any) -> Any:
        for i, (name, text) in enumerate(advice(table).items()):
            command = click.option(
                name, f"unsupported_{i}", is_flag=False, flag_value="", is_eager=True,
                hidden=True, expose_value=False, callback=_refuse(name, text),
            )(command)
        return command

    return decorate


def _refuse(name: str, text: str) -> Callable[..., None]:
    def answer(context: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise LineError(f"{name}: llamagraph does not have it: {text}")

    return answer


refuse_unsupported = refuse(UNSUPPORTED)
