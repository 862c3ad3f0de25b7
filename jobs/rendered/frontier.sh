#!/bin/bash
#SBATCH --job-name=digits-mavg
#SBATCH --nodes=2
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=0-02:00:00
#SBATCH --account=ABC123
#SBATCH --partition=batch
#SBATCH --constraint=nvme
#SBATCH --signal=B:USR2@240
#SBATCH --no-requeue
#SBATCH --output=runs/digits-mavg/job-%j.log
#SBATCH --open-mode=append
#SBATCH -S 8
#
# For OLCF Frontier: one 64-core EPYC (8 kept for the system) and 4 MI250X, which are 8 devices, a node.
# Written by `shoal render`, from:
#: machine = "frontier"
#: config = "jobs/experiments/digits.toml"
#: out = "runs/digits-mavg"
#: name = "digits-mavg"
#: ranks = 16
#: ranks_per_node = 8
#: cores_per_rank = 7
#: gpus_per_rank = 1
#: time_s = 7200
#: after_limit = "chain"
#: account = "ABC123"
#: queue = "batch"
#: stage = "environment.tar"

run=runs/digits-mavg
staged="/mnt/bb/$USER/shoal-environment"
python="$staged/bin/python"
after_limit=chain
max_links=10
max_restarts=2

environment() {
  module load PrgEnv-gnu || return 1
  module load rocm || return 1
  module load craype-accel-amd-gfx90a || return 1
  export OMP_NUM_THREADS=1
  export OPENBLAS_NUM_THREADS=1
  export MKL_NUM_THREADS=1
  export PYTHONUNBUFFERED=1
  export HDF5_USE_FILE_LOCKING=FALSE
  export CUPY_CACHE_DIR="/tmp/shoal-cupy-$USER"
  export SRUN_CPUS_PER_TASK=7
  export MPICH_GPU_SUPPORT_ENABLED=1
  export NCCL_SOCKET_IFNAME=hsn0
  export MIOPEN_USER_DB_PATH="/tmp/shoal-miopen-$USER"
  export MIOPEN_CUSTOM_CACHE_DIR="/tmp/shoal-miopen-$USER"
}

stage() {
  srun \
    --nodes=2 \
    --ntasks=2 \
    --ntasks-per-node=1 \
    tar -xf environment.tar --recursive-unlink --one-top-level="$staged"
}

preflight() {
  "$python" -m shoal preflight
}

launch() {
  srun \
    --nodes=2 \
    --ntasks=16 \
    --ntasks-per-node=8 \
    --cpus-per-task=7 \
    --gpus-per-task=1 \
    --gpu-bind=closest \
    --kill-on-bad-exit=1 \
    "$python" -m shoal train \
    --out="$run" \
    --resume \
    jobs/experiments/digits.toml
}

go_on() { sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" --kill-on-invalid-dep=yes "$run/job.sh" >> "$run/jobs"; }
preempted() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }
end_time() {
  local end; end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)
  { [ -n "$end" ] && date -d "$end" +%s 2>/dev/null; } || echo $(($(date +%s) + 7200))
}

# From here on the script is the same for every job. A run ends with 0 (and the file DONE), 2 (bad input), 75 (try
# again) or 99 (stopped in time, there is more to do); anything else is a failure.

say() { printf '%(%F %T)T shoal: %s\n' -1 "$*"; }
leave() { say "$2"; exit "$1"; }

mkdir -p -- "$run" || leave 1 "the run directory $run cannot be made"
[ -e "$run/DONE" ] && leave 0 "$run is done already"
[ -e "$run/cancelled" ] && leave 0 "$run was cancelled; shoal submit goes on with it"
if [ "$after_limit" = chain ] && [ ! -e "$run/job.sh" ]; then
  leave 1 "a chain submits $run/job.sh, which is not there; save this script under that name, or use shoal submit"
fi
link=$(cat -- "$run/link" 2>/dev/null)
case $link in '' | *[!0-9]*) link=0 ;; esac
rm -f -- "$run/stop"
export SHOAL_CLEARED_STOP=1 # what is put there from now on must not be taken for an old one

# The warning, or the wish that the job end, becomes the file that the ranks look for. bash runs a trap only between
# commands, so the launcher is in the background; and it must not take a signal that was meant for this script.
warned=0 ended=0
trap 'warned=1; : > "$run/stop"' USR1 USR2 URG
trap 'ended=1; : > "$run/stop"' TERM INT

written() { stat -c %s -- "$run/run.jsonl" 2>/dev/null || echo 0; }

train() { # sets `status`
  rm -f -- "$run/status"
  (
    trap '' USR1 USR2 URG TERM INT
    launch
    echo $? > "$run/status"
  ) &
  local pid=$!
  while kill -0 "$pid" 2> /dev/null; do
    wait "$pid" # a signal ends it too, at times with no trap run for it: its own status tells nothing
  done
  { read -r status < "$run/status"; } 2> /dev/null || status=1 # a builtin: a signal to the group would kill a cat
  if [ "$status" = 0 ] && [ ! -e "$run/DONE" ]; then
    say "the launcher ended with 0, but the run is not done"
    status=75
  fi
}

environment || leave 1 "the environment could not be set up"
stage || leave 1 "the environment could not be staged on the nodes"
preflight || leave 2 "the launcher cannot start these ranks: the reason is above"
SHOAL_END_TIME=$(end_time)
export SHOAL_END_TIME
[ "${#LD_LIBRARY_PATH}" -gt 4096 ] && say "LD_LIBRARY_PATH is very long, which can double the time that ranks take to start"
set -u # modules are not written for it
restarts=0 launcher_failed=0
while :; do
  before=$(written)
  train
  case $status in
    0)
      rm -f -- "$run/link"
      leave 0 "done"
      ;;
    99)
      fewer=$(cat -- "$run/nodes" 2>/dev/null)
      [ -n "$fewer" ] && [ "$warned$ended" = 00 ] || break
      say "status 99: going on with the $fewer nodes that are enough"
      give_back "$fewer"
      ;;
    75)
      [ "$warned$ended" = 00 ] && [ "$restarts" -lt "$max_restarts" ] || break
      restarts=$((restarts + 1))
      say "status 75: starting the ranks again ($restarts of $max_restarts)"
      ;;
    2) leave 2 "bad input: the reason is above" ;;
    *)
      if [ "$launcher_failed" = 0 ] && [ "$warned$ended" = 00 ] && [ "$(written)" = "$before" ]; then
        launcher_failed=1
        say "the launcher ended with $status before any rank wrote a line: starting it once more"
      else
        [ "$status" -gt 128 ] && say "that is signal $(kill -l "$status" 2>/dev/null)"
        leave "$status" "training failed with status $status: the reason is above"
      fi
      ;;
  esac
done

# There is more to do. Nobody but this script lets the job go on, and only so often.
trap '' USR1 USR2 URG
[ -e "$run/cancelled" ] && leave 1 "cancelled with status $status"
if [ "$ended" = 1 ] && [ "$warned" = 0 ] && ! preempted; then
  leave 1 "asked to end, with status $status; shoal submit goes on with it"
fi
[ "$after_limit" = none ] && leave "$status" "stopped with status $status; shoal submit goes on with it"
[ "$link" -lt "$max_links" ] || leave 1 "stopped with status $status, and all $max_links links are used up"
link=$((link + 1))
{ echo "$link" > "$run/link.new" && mv -- "$run/link.new" "$run/link"; } || leave 1 "$run/link cannot be written"
say "status $status: going on by $after_limit ($link of $max_links)"
status=0 # go_on may change it
go_on || leave 1 "the scheduler did not take the next link"
exit "$status"
