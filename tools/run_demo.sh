#!/bin/sh
# Generates text for a few prompts from the tiny model, through the whole MLA backend.
#   run_demo.sh <mla command> <model directory>
set -eu
mla=$1
model=$2
for prompt in "SQLite is" "The WAL file " "A database page "; do
    printf '\n> %s' "$prompt"
    "$mla" generate --model "$model" --prompt "$prompt" --max-tokens 120
done
echo
