# What each pod of a run does, by its index; names in double angle brackets are filled in.
set -m # each process has a group of its own: a server is ended with what restarts it
root=<<root>> over=<<root>>/over trainers=() servers=()
mkdir -p "$root"
<<pre_commands>>
if [ "$JOB_COMPLETION_INDEX" = 0 ] && [ ! -e "$root/servers" ]; then
  python3 -m rlx.launch.run_secrets "$root" <<hosts>> || exit 1
  printf '%s\n' <<addresses>> > "$root/.servers" && mv "$root/.servers" "$root/servers"
fi
until [ -e "$root/servers" ]; do sleep 1; done # pod 0 has written the secrets before
export RLX_FLEET_TOKEN="$(cat "$root/token")" PYTHONUNBUFFERED=1
again() { # start what ends badly again, some times
  for pause in $(seq <<restarts>>); do "$@" && exit 0; sleep "$pause"; done
  exec "$@"
}
end() { # the trainer saves its step
  kill -TERM "${trainers[@]}" 2> /dev/null || kill -TERM -- "${servers[@]}"
}
trap end TERM
case $JOB_COMPLETION_INDEX in
<<processes>>
esac
status=0
for pid in "${trainers[@]}"; do
  wait "$pid"; code=$?
  while kill -0 "$pid" 2> /dev/null; do wait "$pid"; code=$?; done # TERM ends a wait
  [ "$code" = 0 ] || status=$code
done
if [ "${#trainers[@]}" = 0 ]; then
  until [ -e "$over" ]; do
    sleep 1 & wait $!
    for each in "${servers[@]}"; do kill -0 -- "$each" 2> /dev/null || exit 1; done
  done
elif [ "$status" = 0 ]; then
  touch "$over" # the pods of servers end too
fi
[ "${#servers[@]}" = 0 ] || kill -TERM -- "${servers[@]}" 2> /dev/null
wait
exit "$status"
