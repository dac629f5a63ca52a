#!/usr/bin/env bash
# Runs the tests that need servers. It first installs missing packages with apt-get, as root or with sudo.
# `cargo test` alone needs none of them.
#
#   ./test.sh              every store on one real server, and every feature at least once
#   ./test.sh redis        one store: builds its driver and installs its server
#   ./test.sh --all        everything: oldest and newest servers, all deployments, crowds, faults (CI)
#   ./test.sh --long       everything at full size, which takes hours
#   ./test.sh --install    only installs, for --all or a store if one is given
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
# The installed servers. `--all` also tests the newest ones.
*) export LEASEHOLD_SERVERS=${LEASEHOLD_SERVERS:-oldest} ;;
esac

# Tests one store: its packages and the command. One cargo command selects all, so nothing is built twice.
one() {
    local packages=$1 features=$2 cargo=(cargo test --locked -p leasehold-cli)
    shift 2
    for package in $packages; do cargo+=(-p "$package"); done
    [ -z "$features" ] || cargo+=(--features "$features")
    "${cargo[@]}" --lib --bins --test store --test command --no-run
    [ "$until" != build ] || exit 0
    "${cargo[@]}" --lib --bins --test store -- "$@"
    "${cargo[@]}" --test command -- "$what" "on_$what"
}
sql='leasehold-sql leasehold-transactions'
databases='leasehold-sql/tls'
for database in sqlite postgres mysql; do
    databases+=" leasehold-sql/$database leasehold-transactions/$database"
done
case $what in
file) one leasehold-file '' ;;
sqlite | postgres) one "$sql" "$databases leasehold-cli/$what" "$what" ;;
mysql) one "$sql" "$databases leasehold-cli/mysql" mysql mariadb ;;
redis) one leasehold-redis 'leasehold-redis/tls leasehold-cli/redis' ;;
redlock) one leasehold-redlock 'leasehold-cli/redlock' ;;
zookeeper | etcd) one "leasehold-$what" "leasehold-$what/tls leasehold-cli/$what" ;;
memcached | nats) one leasehold-cell "leasehold-cell/$what leasehold-cli/$what" "$what" ;;
s3 | gs | az) one leasehold-cell "leasehold-cell/$what leasehold-cli/$what" "::$what::" objects ;;
esac
[[ $stores != *" $what "* ]] || exit 0

all=(cargo test --locked --workspace --all-features --no-fail-fast)
"${all[@]}" --lib --bins --tests --no-run
cargo build --locked --workspace --all-features --examples
[ "$until" != build ] || exit 0

# Most tests wait, for leases to expire and servers to start, so lanes overlap. Tests that only compute, and
# the compilers they start, run at the lowest priority, because a test with a short lease needs the processor
# as soon as it wakes up.
logs=$(mktemp -d) which=()
trap 'rm -rf "$logs"' EXIT
lane() {
    local name=$1 threads=$2 began=$SECONDS priority=()
    shift 2
    [[ " computing docs " != *" $name "* ]] || priority=(nice -n 19)
    if RUST_TEST_THREADS=$threads "${priority[@]}" "${all[@]}" "$@" -- "${ignored[@]}" "${which[@]}" \
        >"$logs/$name" 2>&1; then
        echo "ok      $name ($((SECONDS - began)) s): $(grep -c '^test .* ok$' "$logs/$name") tests"
    else
        echo "FAILED  $name ($((SECONDS - began)) s)"
        touch "$logs/failed"
    fi
    grep '^test result: .*; [1-9][0-9]* failed' "$logs/$name" || true
    sed -nE '/^(failures:|error)/,/^test result/p' "$logs/$name"
}

# The names of the test programs: those that compute, those of the command, those that run alone, the rest.
computing=(cell_model controls features layers model pip redlock_model simulation)
command=(command fenced_writes)
# Tests of two of these programs that start dozens of clients, or use a server or a compiler that takes a processor.
crowds=(hand_over_cost:: database:: each_store::on_{s3,gs,az}:: clients::{java,go} servers::object_store)
others=("${crowds[@]/#/--skip=}")
alone=(conformance examples torture)
rest=()
for file in crates/*/tests/*.rs crates/*/tests/*/main.rs examples/*/tests/*.rs; do
    name=$(basename "${file%/main.rs}" .rs)
    [[ " ${computing[*]} ${command[*]} ${alone[*]} core store " = *" $name "* ]] ||
        rest+=("--test=$name")
done

(
    lane computing 2 "${computing[@]/#/--test=}"
    lane docs 4 --doc
) &
(
    (which=("${others[@]}") && lane command 4 "${command[@]/#/--test=}")
    lane units 4 --lib --bins
    lane rest 4 "${rest[@]}"
) &
others_done=$!
lane store 10 --test store
wait "$others_done"
(which=("${crowds[@]}") && lane crowds 4 --test command --test torture)
# These run beside nothing but the lowest priority. They have leases of half a second, ten thousand waiters,
# or a process for each request.
lane core 16 --test=core
(which=("${others[@]}") && lane alone 8 "${alone[@]/#/--test=}")
# Repeats the tests on the oldest servers, for stores whose first run used newer ones.
if [ "$what" = all ]; then
    export LEASEHOLD_SERVERS=oldest
    which=(doctor:: redlock_conformance:: conformance::{redis,postgres,mariadb,zookeeper,etcd}::)
    lane oldest 10 --test store
fi
wait
count() {
    cat "$logs"/* | grep -cE "^test .* $1( <.*>)?\$" || true
}
echo "$(count ok) passed, $(count FAILED) failed"
[ ! -e "$logs/failed" ]
