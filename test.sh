#!/usr/bin/env bash
# Runs the tests that need servers. What they need beside Rust is installed first, where it is missing
# (with apt-get, as root or through sudo). `cargo test` alone needs none of this.
#
#   ./test.sh              every store on one real server, and every feature at least once
#   ./test.sh redis        one store: builds its driver and installs its server
#   ./test.sh --all        everything: oldest and newest servers, all deployments, crowds, faults (CI)
#   ./test.sh --long       everything in full size, which takes hours
#   ./test.sh --install    only installs; with --all or a store, what that needs
#   ./test.sh --build      only installs and builds
#
# Stores: file sqlite postgres mysql redis redlock zookeeper etcd memcached nats s3 gs az
set -euo pipefail
cd "$(dirname "$0")"

stores=' file sqlite postgres mysql redis redlock zookeeper etcd memcached nats s3 gs az '
what=default until=run
for word in "$@"; do
    case $word in
    --all | --long) what=${word#--} ;;
    --install | --build) until=${word#--} ;;
    *)
        if [[ $stores != *" $word "* ]]; then
            echo "test.sh: unknown store or option \"$word\"; stores:$stores" >&2
            exit 2
        fi
        what=$word
        ;;
    esac
done
if ! command -v cargo >/dev/null; then
    echo 'test.sh: no cargo; install Rust first: https://rustup.rs' >&2
    exit 1
fi
crates/testbed/install.sh "$what"
[ "$until" != install ] || exit 0

ignored=()
case $what in
all) ignored=(--include-ignored) && export LEASEHOLD_TESTS=all ;;
long) ignored=(--include-ignored) && export LEASEHOLD_TESTS=long ;;
# The servers of this machine; `--all` tests the newest ones too.
*) export LEASEHOLD_SERVERS=${LEASEHOLD_SERVERS:-oldest} ;;
esac

# One store: its package and the command, in one selection, so that nothing is built twice.
one() {
    local package=$1 features=$2 cargo=(cargo test --locked -p leasehold-cli -p "$1")
    shift 2
    [ -z "$features" ] || cargo+=(--features "$features")
    "${cargo[@]}" --lib --bins --test store --test command --no-run
    [ "$until" != build ] || exit 0
    "${cargo[@]}" --lib --bins --test store -- "$@"
    "${cargo[@]}" --test command -- "$what" "on_$what"
}
sql='leasehold-sql/sqlite leasehold-sql/postgres leasehold-sql/mysql leasehold-sql/tls'
case $what in
file) one leasehold-file '' ;;
sqlite | postgres) one leasehold-sql "$sql leasehold-cli/$what" "$what" ;;
mysql) one leasehold-sql "$sql leasehold-cli/mysql" mysql mariadb ;;
redis) one leasehold-redis 'leasehold-redis/tls leasehold-cli/redis' --skip redlock ;;
redlock) one leasehold-redis 'leasehold-redis/redlock leasehold-cli/redlock' redlock ;;
zookeeper | etcd) one "leasehold-$what" "leasehold-$what/tls leasehold-cli/$what" ;;
memcached | nats) one leasehold-cell "leasehold-cell/$what leasehold-cli/$what" "$what" ;;
s3 | gs | az) one leasehold-cell "leasehold-cell/$what leasehold-cli/$what" "::$what::" objects ;;
esac
[[ $stores != *" $what "* ]] || exit 0

all=(cargo test --locked --workspace --all-features --no-fail-fast)
"${all[@]}" --lib --bins --tests --no-run
cargo build --locked --workspace --all-features --examples
[ "$until" != build ] || exit 0

# Tests that compute come first and alone: beside them, tests with short leases would lose them. Most others
# wait, for leases to expire and servers to start, so they overlap.
logs=$(mktemp -d) only=()
trap 'rm -rf "$logs"' EXIT
lane() {
    local name=$1 threads=$2 began=$SECONDS
    shift 2
    if RUST_TEST_THREADS=$threads "${all[@]}" "$@" -- "${ignored[@]}" "${only[@]}" \
        >"$logs/$name" 2>&1; then
        echo "ok      $name ($((SECONDS - began)) s): $(grep -c '^test .* ok$' "$logs/$name") tests"
    else
        echo "FAILED  $name ($((SECONDS - began)) s)"
        touch "$logs/failed"
    fi
    grep '^test result: .*; [1-9][0-9]* failed' "$logs/$name" || true
    sed -nE '/^(failures:|error)/,/^test result/p' "$logs/$name"
}

# The programs that compute, the command's tests, and the rest, by name.
computing=(cell_model controls core features layers model redlock_model)
command=(command fenced_writes)
alone=(conformance examples pip torture)
rest=()
for file in crates/*/tests/*.rs crates/*/tests/*/main.rs examples/*/tests/*.rs; do
    name=$(basename "${file%/main.rs}" .rs)
    [[ " ${computing[*]} ${command[*]} ${alone[*]} simulation store " = *" $name "* ]] ||
        rest+=("--test=$name")
done

lane units 4 --lib --bins
lane store 12 --test store &
lane command 4 "${command[@]/#/--test=}" &
lane rest 4 "${rest[@]}" &
lane computing 2 "${computing[@]/#/--test=}"
# Thousands of worlds are worth an optimizing compiler, the few of the default run are not.
(
    [ ${#ignored[@]} = 0 ] || all=(cargo test --locked --profile simulation -p leasehold-conformance)
    lane simulation 2 --test simulation
)
lane docs 4 --doc
wait
# These have leases of half a second, or start a process for each request.
lane alone 8 "${alone[@]/#/--test=}"
if [ "$what" = all ]; then
    export LEASEHOLD_SERVERS=oldest
    only=(conformance:: doctor::)
    lane oldest 12 --test store
fi
count() {
    cat "$logs"/* | grep -cE "^test .* $1( <.*>)?\$" || true
}
echo "$(count ok) passed, $(count FAILED) failed"
[ ! -e "$logs/failed" ]
