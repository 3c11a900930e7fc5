#!/bin/sh
# Runs the tests through ctest and closes with one line "N passed, N failed".
#   run_tests.sh <build directory> <jobs> [soak]
set -eu
build=$1
jobs=$2
label=${3:-}
if [ -n "$label" ]; then select="-L $label"; else select="-LE soak"; fi
log="$build/test.log"
status=0
# Timings and thread counts matter to no test, so they may share the cores.
# shellcheck disable=SC2086
ctest --test-dir "$build" -j "$jobs" --output-on-failure --no-tests=error $select >"$log" 2>&1 || status=$?
cat "$log"
failed=$(sed -n 's/^[0-9]*% tests passed, \([0-9]*\) tests failed out of \([0-9]*\)$/\1/p' "$log" | tail -n 1)
total=$(sed -n 's/^[0-9]*% tests passed, \([0-9]*\) tests failed out of \([0-9]*\)$/\2/p' "$log" | tail -n 1)
if [ -z "$total" ]; then
    echo "no test ran" >&2
    exit 1
fi
skipped=$(grep -c '(Skipped)$' "$log" || true)
if [ "$skipped" -gt 0 ]; then echo "$skipped skipped, for want of a device"; fi
echo "$((total - failed - skipped)) passed, $failed failed"
exit $status
