#!/bin/bash
# One run as one job: a step of servers, and a step of the trainer's processes, which the job ends
# with. The same file is what each task of a step runs, with the step's name. Of a template,
# names in double angle brackets are filled in; what a run needs is in this one.
<<directives>>
#SBATCH --output=/dev/null
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@<<grace>>
root=<<root>>
attempt=<<attempt>>${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}
script=<<attempt>>/job.sh
export PYTHONPATH=<<home>>${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if [ $# -gt 0 ]; then # a task of the step $1
  read -ra nodes <<< "$RLX_NODES"
  again() { # start what ends badly anew, some times
    for pause in $(seq <<restarts>>); do "$@" && exit 0; sleep "$pause"; done
    exec "$@"
  }
  trainer() { # a trainer that was asked to end has not failed: Slurm would kill the others
    "$@" &
    echo "$!" > "$attempt/trainer-$SLURM_PROCID.pid"
    wait "$!"
    status=$?
    [ "$status" = 130 ] || exit "$status"
    touch "$attempt/saved"
    exit 0
  }
  <<pre_commands>>
  [ -z '<<server_names>>' ] || export RLX_FLEET_TOKEN="${RLX_FLEET_TOKEN:-$(cat "$root/token" 2> /dev/null)}"
  case $1-$SLURM_PROCID in
<<processes>>
  esac
  exit 1
fi

id=<<id>>
grep -q "^id=$id" "$script" || exit 66 # and nowhere to say it: the exit code does
mkdir -p "$attempt" && exec >> "$attempt/job.log" 2>&1
mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
for name in "${names[@]}"; do
  nodes+=("$(scontrol show node --oneliner "$name" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')")
done
export RLX_NODES="${nodes[*]}"
echo "job $SLURM_JOB_ID on ${names[*]}"

step() { # NAME HOSTS...: srun's options for a step of a task on each of the hosts, in order
  printf '%s\n' "${@:2}" > "$attempt/$1.hosts"
  SLURM_HOSTFILE="$attempt/$1.hosts" srun --job-name="$1" --ntasks=$(($# - 1)) \
    --distribution=arbitrary --overlap --mpi=none --cpu-bind=none --kill-on-bad-exit="$kill" \
    --output="$attempt/$1-%t.log" <<srun>> <<container>> bash "$script" "$1"
}
end_trainer() { # ask trainer 0, alone, to save its step and end; it tells the others
  srun --overlap --mpi=none --nodes=1 --ntasks=1 --nodelist=<<first>> \
    bash -c 'kill -TERM "$(cat "$0/trainer-0.pid")"' "$attempt" 2> /dev/null
}

<<check>> # what has a ✗ is in the log
<<python>> -m rlx.launch.run_secrets "$root" "${nodes[@]}" || exit 67
printf '%s\n' <<addresses>> > "$root/servers"

servers=
if [ -n '<<server_names>>' ]; then
  kill=0 step server <<server_names>> &
  servers=$!
fi

held() { # by a process of another node, which gave a sign of life in the last minute
  [ -n "$(find "$root/../running.json" -newermt '-65 seconds' 2> /dev/null)" ] &&
    ! grep -q "$(cat /proc/sys/kernel/random/boot_id)" "$root/../running.json"
}
for _ in $(seq 65); do held || break; sleep 1; done # a killed one does not say that it is gone

ending=
trap 'ending=1; end_trainer || kill "$trainer"' TERM # the time is nearly up, or a user ends it
kill=1 step trainer <<trainer_names>> &
trainer=$!
wait "$trainer"
status=$?
[ -z "$ending" ] || { wait "$trainer"; status=$?; }
if [ -n "$servers" ]; then
  scancel --quiet --signal=TERM "$(squeue --steps --noheader --jobs="$SLURM_JOB_ID" \
    --format='%i %j' | awk '$2 == "server" { print $1 }')"
  for _ in $(seq 100); do kill -0 "$servers" 2> /dev/null || break; sleep 0.2; done
fi
if [ -e "$attempt/saved" ]; then # and not all steps are done
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  [ "$state" != RUNNING ] || [ -e <<attempt>>/cancel ] || scontrol requeue "$SLURM_JOB_ID"
  exit 130
fi
exit "$status"
