// Against a real `leasehold serve`. LEASEHOLD_COMMAND says where the command is.
//
// Each test is named after a row of the tables in clients/README.md.

package leasehold

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

const longLease = time.Hour

var background = context.Background()

// direct sends the requests of the tests, without the proxy settings of the environment.
var direct = &http.Client{Transport: &http.Transport{Proxy: nil}}

// TestMain is not a test. It also runs the other processes of tests.
func TestMain(m *testing.M) {
	if what := os.Getenv("LEASEHOLD_TEST_CHILD"); what != "" {
		child(what)
		return
	}
	os.Exit(m.Run())
}

// Helpers.

func command() string {
	if path := os.Getenv("LEASEHOLD_COMMAND"); path != "" {
		return path
	}
	return "leasehold"
}

func check(t *testing.T, holds bool, what any) {
	t.Helper()
	if !holds {
		t.Fatalf("%v", what)
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	check(t, err == nil, err)
}

func equal[T comparable](t *testing.T, found, wanted T) {
	t.Helper()
	check(t, found == wanted, fmt.Sprintf("%v instead of %v", found, wanted))
}

func fails(t *testing.T, err, wanted error) {
	t.Helper()
	check(t, errors.Is(err, wanted), fmt.Sprintf("%v instead of %v", err, wanted))
}

func matches(t *testing.T, text, pattern string) {
	t.Helper()
	check(t, regexp.MustCompile(pattern).MatchString(text), text)
}

func eventually(t *testing.T, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(10 * time.Millisecond) {
		check(t, time.Now().Before(end), "never")
	}
}

// begun starts a function on another goroutine.
func begun(work func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- work() }()
	return done
}

func start(t *testing.T, variables []string, words ...string) (*exec.Cmd, *bufio.Reader, io.Writer) {
	t.Helper()
	process := exec.Command(words[0], words[1:]...)
	process.Env = append(os.Environ(), variables...)
	process.Stderr = os.Stderr
	output, err := process.StdoutPipe()
	ok(t, err)
	input, err := process.StdinPipe()
	ok(t, err)
	ok(t, process.Start())
	t.Cleanup(func() {
		// It may have ended.
		_ = process.Process.Kill()
		_ = process.Wait()
	})
	return process, bufio.NewReader(output), input
}

func readLine(t *testing.T, lines *bufio.Reader) string {
	t.Helper()
	line, err := lines.ReadString('\n')
	ok(t, err)
	return strings.TrimSpace(line)
}

func succeeds(t *testing.T, store string, words ...string) {
	t.Helper()
	process := exec.Command(command(), words...)
	process.Env = append(os.Environ(), "LEASEHOLD_STORE="+store)
	output, err := process.CombinedOutput()
	check(t, err == nil, fmt.Sprintf("%v: %s", err, output))
}

type server struct {
	process *exec.Cmd
	url     string
}

func serve(t *testing.T, store string, words ...string) server {
	t.Helper()
	process, lines, _ := start(t, nil, append([]string{command(), "serve", "--store", store}, words...)...)
	line := readLine(t, lines)
	return server{process, strings.TrimPrefix(line, "listening on ") + "/"}
}

// newServer returns a server of files.
func newServer(t *testing.T) server {
	t.Helper()
	return serve(t, "file:"+t.TempDir()+"/store", "--listen", "127.0.0.1:0", "--no-auth")
}

// connect returns a client that is not closed at the end: the server may be paused.
func connect(t *testing.T, store string) *Client {
	t.Helper()
	client, err := Connect(store)
	ok(t, err)
	return client
}

func acquire(t *testing.T, client *Client, name string, opts Options) *Held {
	t.Helper()
	held, err := client.Acquire(background, name, opts)
	ok(t, err)
	return held
}

func isTaken(t *testing.T, client *Client, name string, opts Options) {
	t.Helper()
	_, err := client.TryAcquire(background, name, opts)
	fails(t, err, ErrNotAcquired)
}

// claims returns how many claims the lock "x y" has.
func claims(t *testing.T, store string) int {
	t.Helper()
	response, err := direct.Get(store + "v1/locks/x%20y/holders")
	ok(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	ok(t, err)
	equal(t, response.StatusCode, 200)
	return strings.Count(string(body), `"standing"`)
}

func isFree(t *testing.T, store string) {
	t.Helper()
	equal(t, claims(t, store), 0)
}

func eventuallyClaims(t *testing.T, store string, count int) {
	t.Helper()
	eventually(t, func() bool { return claims(t, store) == count })
}

type reply struct {
	status int
	text   string
}

// rule returns the answer for the client, or nil to close the connection.
type rule func(method, body string, forward func() *reply) *reply

func pass(_, _ string, forward func() *reply) *reply { return forward() }

func drop(_, _ string, _ func() *reply) *reply { return nil }

// proxy passes requests on to a server, according to a rule.
type proxy struct {
	target string
	host   string

	mu   sync.Mutex
	rule rule
}

func newProxy(t *testing.T, target string, rule rule) *proxy {
	t.Helper()
	return newTLSProxy(t, target, rule, nil)
}

func newTLSProxy(t *testing.T, target string, rule rule, config *tls.Config) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	p := &proxy{target: target, host: listener.Addr().String(), rule: rule}
	if config != nil {
		listener = tls.NewListener(listener, config)
	}
	// Without a log of rejected certificates.
	server := &http.Server{Handler: p, ErrorLog: log.New(io.Discard, "", 0)}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	return p
}

func (p *proxy) store() string {
	return "http://" + p.host + "/"
}

func (p *proxy) set(rule rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rule = rule
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	rule := p.rule
	p.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	method, path := r.Method, strings.TrimPrefix(r.RequestURI, "/")
	answer := rule(method, string(body), func() *reply { return forward(method, p.target+path, string(body)) })
	if answer == nil {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(answer.status)
	io.WriteString(w, answer.text)
}

func forward(method, url, body string) *reply {
	request, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return nil
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := direct.Do(request)
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil
	}
	return &reply{response.StatusCode, string(text)}
}

func deadline(t *testing.T, held *Held) time.Time {
	t.Helper()
	end, isKnown := held.Deadline()
	check(t, isKnown, "no deadline")
	return end
}

// outlives waits until the lock was renewed a whole lease after now.
func outlives(t *testing.T, held *Held, lease time.Duration) {
	t.Helper()
	end := time.Now().Add(2 * lease)
	eventually(t, func() bool {
		ok(t, held.Check())
		return deadline(t, held).After(end)
	})
}

// isLostInTime checks a lock that was just acquired, and whose renewals do not succeed: it is lost when its lease ends,
// by the clock.
func isLostInTime(t *testing.T, held *Held, lease time.Duration) {
	t.Helper()
	called := make(chan struct{})
	held.OnLost(func() { close(called) })
	end := deadline(t, held)
	check(t, end.Before(time.Now().Add(lease*99/100)), end)
	eventually(t, func() bool {
		moment := time.Now()
		isLost := held.IsLost()
		check(t, isLost || moment.Before(end.Add(20*time.Millisecond)), "held after its deadline")
		return isLost
	})
	<-held.Context().Done()
	<-called
	check(t, !time.Now().Before(end.Add(-20*time.Millisecond)), "lost before its deadline")
	equal(t, held.State(), StateLost)
}

// startChild starts another process that holds "x y".
func startChild(t *testing.T, what, store string, lease time.Duration) (*exec.Cmd, *bufio.Reader, io.Writer) {
	t.Helper()
	path, err := os.Executable()
	ok(t, err)
	variables := []string{"LEASEHOLD_TEST_CHILD=" + what, "LEASEHOLD_STORE=" + store, "LEASE=" + lease.String()}
	return start(t, variables, path)
}

func child(what string) {
	lease, err := time.ParseDuration(os.Getenv("LEASE"))
	must(err)
	client, err := ConnectFromEnv()
	must(err)
	held, err := client.Acquire(background, "x y", Options{Lease: lease})
	must(err)
	switch what {
	case "holds":
		fmt.Println("held")
		awaitInput()
	case "has-children":
		process := exec.Command("sleep", "1000")
		must(process.Start())
		fmt.Println(process.Process.Pid)
		awaitInput()
	case "waits-for-loss":
		fmt.Println("held")
		awaitInput()
		fmt.Println(held.State())
		fmt.Println(errors.Is(held.Close(), ErrLost))
	case "exits-in-release":
		go held.Close()
	case "exits":
	case "releases-at-exit":
		defer held.Close()
	case "releases-at-signal":
		ctx, stop := signal.NotifyContext(background, syscall.SIGTERM)
		defer stop()
		fmt.Println("held")
		<-ctx.Done()
		must(client.Close())
	default:
		panic(what)
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func awaitInput() {
	// The end of the input is as good as a line.
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
}

// The behavior of all clients.

func TestALockIsHeldAndReleased(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	first := acquire(t, client, "x y", Options{Label: "the first"})
	equal(t, first.State(), StateHeld)
	equal(t, first.Name(), "x y")
	succeeds(t, store, "verify", first.Sequencer())
	ok(t, first.Check())
	ok(t, first.Context().Err())
	_, err := client.TryAcquire(background, "x y", Options{})
	fails(t, err, ErrNotAcquired)
	matches(t, err.Error(), "the first")
	ok(t, first.Close())
	ok(t, first.Close())
	equal(t, first.State(), StateReleased)
	fails(t, first.Check(), ErrReleased)
	fails(t, first.Context().Err(), context.Canceled)
	isFree(t, store)
	later, err := client.TryAcquire(background, "x y", Options{})
	ok(t, err)
	check(t, later.Token() > first.Token(), later)
	ok(t, later.Close())
	// A client that is closed releases its locks, and ends its waits.
	held := acquire(t, client, "x y", Options{})
	waiter := begun(func() error {
		_, err := client.Acquire(background, "x y", Options{})
		return err
	})
	eventuallyClaims(t, store, 2)
	ok(t, client.Close())
	equal(t, held.State(), StateReleased)
	fails(t, <-waiter, ErrClosed)
	isFree(t, store)
	_, err = client.Acquire(background, "x y", Options{})
	fails(t, err, ErrClosed)
	// Over a Unix socket.
	socket := filepath.Join(t.TempDir(), "socket")
	serve(t, "memory:", "--listen", "unix:"+socket)
	ok(t, acquire(t, connect(t, "http+unix://"+socket), "x y", Options{}).Close())
}

func TestAWaiterSeesTheHolders(t *testing.T) {
	t.Parallel()
	client := connect(t, newServer(t).url)
	first := acquire(t, client, "x", Options{Label: "the first"})
	var seen []Waiting
	// Without a data race, because this goroutine calls it.
	second := acquire(t, client, "x", Options{OnWaiting: func(waiting Waiting) {
		seen = append(seen, waiting)
		ok(t, first.Close())
	}})
	ok(t, second.Close())
	equal(t, seen[0].Ahead, 1)
	matches(t, seen[0].HeldBy, `\(the first\) for `)
	equal(t, len(seen[0].Holders), 1)
	holder := seen[0].Holders[0]
	equal(t, holder.Label, "the first")
	equal(t, holder.PID, int64(os.Getpid()))
	equal(t, holder.Token, first.Token())
}

// panics returns whether the function panics.
func panics(work func()) (isPanic bool) {
	defer func() { isPanic = recover() != nil }()
	work()
	return false
}

func TestAnErrorInTheBodyReleasesTheLock(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	check(t, panics(func() {
		held := acquire(t, client, "x y", Options{})
		defer held.Close()
		panic("inside")
	}), "no panic")
	isFree(t, store)
	// So does an error of the callback.
	held := acquire(t, client, "x y", Options{})
	check(t, panics(func() {
		_, _ = client.Acquire(background, "x y", Options{OnWaiting: func(Waiting) { panic("inside") }})
	}), "no panic")
	eventuallyClaims(t, store, 1)
	ok(t, held.Close())
}

func TestHoldersTakeTurns(t *testing.T) {
	t.Parallel()
	client := connect(t, newServer(t).url)
	var inside atomic.Int32
	turn := func() error {
		held, err := client.Acquire(background, "x", Options{})
		if err != nil {
			return err
		}
		if count := inside.Add(1); count != 1 {
			return fmt.Errorf("%d holders", count)
		}
		time.Sleep(time.Millisecond)
		inside.Add(-1)
		return held.Close()
	}
	var turns []<-chan error
	for i := 0; i < 10; i++ {
		turns = append(turns, begun(turn))
	}
	for _, done := range turns {
		ok(t, <-done)
	}
}

func TestACancelledWaitLeavesTheQueue(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	held := acquire(t, client, "x y", Options{})
	ctx, cancel := context.WithCancel(background)
	waiter := begun(func() error {
		_, err := client.Acquire(ctx, "x y", Options{})
		return err
	})
	eventuallyClaims(t, store, 2)
	cancel()
	fails(t, <-waiter, context.Canceled)
	eventuallyClaims(t, store, 1)
	short, stop := context.WithTimeout(background, 100*time.Millisecond)
	defer stop()
	_, err := client.Acquire(short, "x y", Options{})
	fails(t, err, context.DeadlineExceeded)
	ok(t, held.Check())
	ok(t, held.Close())
}

func TestAKilledCallerReleasesTheLock(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	process, lines, _ := startChild(t, "holds", store, 5*time.Second)
	equal(t, readLine(t, lines), "held")
	equal(t, claims(t, store), 1)
	ok(t, process.Process.Kill())
	ok(t, acquire(t, connect(t, store), "x y", Options{}).Close())
}

func TestChildrenOfAKilledCallerDoNotKeepTheLock(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	process, lines, _ := startChild(t, "has-children", store, 5*time.Second)
	var pid int
	_, err := fmt.Sscan(readLine(t, lines), &pid)
	ok(t, err)
	defer syscall.Kill(pid, syscall.SIGKILL)
	ok(t, process.Process.Kill())
	ok(t, acquire(t, connect(t, store), "x y", Options{}).Close())
	ok(t, syscall.Kill(pid, 0))
}

func TestAChildProcessCannotReleaseTheLock(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	held := acquire(t, connect(t, store), "x y", Options{})
	for _, number := range []os.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		process := exec.Command("sleep", "1000")
		ok(t, process.Start())
		ok(t, process.Process.Signal(number))
		check(t, process.Wait() != nil, "no signal")
	}
	ok(t, held.Check())
	equal(t, claims(t, store), 1)
	ok(t, held.Close())
}

func TestAnInterruptedAcquireLeavesNothingHeld(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	ok(t, acquire(t, client, "x y", Options{}).Close())
	for _, delay := range []time.Duration{0, 1, 2, 5, 10, 15, 20, 30, 50, 100} {
		ctx, cancel := context.WithTimeout(background, delay*time.Millisecond)
		held, err := client.Acquire(ctx, "x y", Options{})
		cancel()
		if err == nil {
			ok(t, held.Close())
		} else {
			fails(t, err, context.DeadlineExceeded)
		}
		eventuallyClaims(t, store, 0)
	}
	ctx, cancel := context.WithCancel(background)
	cancel()
	_, err := client.Acquire(ctx, "x y", Options{})
	fails(t, err, context.Canceled)
	isFree(t, store)
}

func TestAnInterruptedReleaseCanBeRepeated(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	mayEnd := make(chan struct{})
	store := newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		if method == http.MethodDelete {
			<-mayEnd
		}
		return forward()
	}).store()
	held := acquire(t, connect(t, store), "x y", Options{})
	ctx, cancel := context.WithCancel(background)
	cancel()
	fails(t, held.Release(ctx), context.Canceled)
	fails(t, held.Check(), ErrReleased)
	close(mayEnd)
	ok(t, held.Close())
	ok(t, held.Release(ctx))
	equal(t, held.State(), StateReleased)
	isFree(t, direct)
	// The process ends in the middle of it.
	process, _, _ := startChild(t, "exits-in-release", direct, 2*time.Second)
	ok(t, process.Wait())
	eventuallyClaims(t, direct, 0)
}

func TestALockCanBeReleasedAtExit(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	process, _, _ := startChild(t, "releases-at-exit", store, longLease)
	ok(t, process.Wait())
	isFree(t, store)
	process, lines, _ := startChild(t, "releases-at-signal", store, longLease)
	equal(t, readLine(t, lines), "held")
	equal(t, claims(t, store), 1)
	ok(t, process.Process.Signal(syscall.SIGTERM))
	ok(t, process.Wait())
	isFree(t, store)
	process, _, _ = startChild(t, "exits", store, 2*time.Second)
	ok(t, process.Wait())
	eventuallyClaims(t, store, 0)
}

func TestAnUnreferencedLockStaysHeld(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	var renewals atomic.Int32
	store := newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		if method == http.MethodPut {
			renewals.Add(1)
		}
		return forward()
	}).store()
	acquire(t, connect(t, store), "x y", Options{Lease: 5 * time.Second})
	for i := 0; i < 3; i++ {
		before := renewals.Load()
		eventually(t, func() bool {
			runtime.GC()
			return renewals.Load() > before+1
		})
		equal(t, claims(t, direct), 1)
	}
}

// candidacy is a candidate in the background.
type candidacy struct {
	cancel context.CancelFunc
	done   <-chan error
}

func candidate(client *Client, lead func(term *Held)) candidacy {
	ctx, cancel := context.WithCancel(background)
	return candidacy{cancel, begun(func() error {
		return client.Elect(ctx, "x y", Options{}, func(ctx context.Context, term *Held) error {
			lead(term)
			<-ctx.Done()
			return ctx.Err()
		})
	})}
}

func TestACandidateTakesOverWhenTheLeaderIsGone(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	terms := make(chan *Held, 9)
	leaders := make(chan string, 9)
	lead := func(who string) func(*Held) {
		return func(term *Held) {
			terms <- term
			leaders <- who
		}
	}
	one := candidate(client, lead("one"))
	equal(t, <-leaders, "one")
	two := candidate(client, lead("two"))
	eventuallyClaims(t, store, 2)
	succeeds(t, store, "evict", "x y")
	// Evicted, it rejoins the queue, behind the other.
	equal(t, <-leaders, "two")
	eventuallyClaims(t, store, 2)
	first, second := <-terms, <-terms
	check(t, second.Token() > first.Token(), second)
	equal(t, first.State(), StateLost)
	ok(t, second.Check())
	for _, each := range []candidacy{one, two} {
		each.cancel()
	}
	for _, each := range []candidacy{one, two} {
		fails(t, <-each.done, context.Canceled)
	}
	eventuallyClaims(t, store, 0)
	// An error in the body ends the election, and the term.
	inside := errors.New("inside")
	err := client.Elect(background, "x y", Options{}, func(context.Context, *Held) error { return inside })
	fails(t, err, inside)
	isFree(t, store)
}

func TestCandidatesSurviveAnUnreachableStore(t *testing.T) {
	t.Parallel()
	var joins atomic.Int32
	proxy := newProxy(t, newServer(t).url, func(method, _ string, _ func() *reply) *reply {
		if method == http.MethodPost {
			joins.Add(1)
		}
		return nil
	})
	leads := errors.New("leads")
	client := connect(t, proxy.store())
	term := begun(func() error {
		work := func(context.Context, *Held) error { return leads }
		return client.Elect(background, "x", Options{Wait: time.Millisecond}, work)
	})
	eventually(t, func() bool { return joins.Load() > 2 })
	check(t, len(term) == 0, "the election has ended")
	proxy.set(pass)
	fails(t, <-term, leads)
}

func TestAnElectionEndsForInvalidOptions(t *testing.T) {
	t.Parallel()
	client := connect(t, newServer(t).url)
	work := func(context.Context, *Held) error { return nil }
	fails(t, client.Elect(background, strings.Repeat("x", 999), Options{}, work), ErrUsage)
	fails(t, client.Elect(background, "x", Options{Kind: Semaphore, Size: 2, Permits: 3}, work), ErrUsage)
	fails(t, client.Elect(background, "x", Options{Lease: time.Millisecond}, work), ErrUsage)
}

func TestInvalidOptionsAreRejected(t *testing.T) {
	t.Parallel()
	client := connect(t, newServer(t).url)
	for _, opts := range []Options{
		{Kind: Semaphore},
		{Kind: Semaphore, Size: -1},
		{Kind: Semaphore, Size: 2, Permits: -1},
		{Kind: Semaphore, Size: 2, Permits: 3},
		{Kind: Reader, Size: 2},
		{Permits: 1},
		{Kind: 9},
		{Label: "\xff"},
	} {
		_, err := client.Acquire(background, "x", opts)
		fails(t, err, ErrUsage)
	}
	for _, name := range []string{"", "\xff"} {
		_, err := client.Acquire(background, name, Options{})
		fails(t, err, ErrUsage)
	}
	_, err := client.TryAcquire(background, "x", Options{Wait: time.Second})
	fails(t, err, ErrUsage)
	_, err = connect(t, "http://127.0.0.1:1/").TryAcquire(background, "x", Options{})
	fails(t, err, ErrUnavailable)
	var problem *Error
	check(t, errors.As(err, &problem), err)
	equal(t, problem.Kind, "unreachable")
	matches(t, problem.Message, "connection refused")
}

func TestTimesAreRoundedToMilliseconds(t *testing.T) {
	t.Parallel()
	bodies := make(chan string, 9)
	direct := newServer(t).url
	client := connect(t, newProxy(t, direct, func(_, body string, _ func() *reply) *reply {
		bodies <- body
		return &reply{409, `{"kind": "contended"}`}
	}).store())
	for given, sent := range map[time.Duration]int{1: 1, 1_400_000: 1, 1_500_000: 2, 10 * time.Second / 3: 3333} {
		_, err := client.Acquire(background, "x", Options{Wait: given, LockDelay: given})
		fails(t, err, ErrNotAcquired)
		body := <-bodies
		matches(t, body, fmt.Sprintf(`"lock_delay_ms":%d\b`, sent))
		matches(t, body, `"mode":"wait"`)
	}
	isTaken(t, client, "x", Options{})
	body := <-bodies
	matches(t, body, `"lock_delay_ms":0\b`)
	matches(t, body, `"mode":"try"`)
	for given, sent := range map[time.Duration]int{
		10 * time.Second / 3: 3333, 50 * time.Millisecond: 50, 24 * time.Hour: 86_400_000, 0: 15_000,
	} {
		isTaken(t, client, "x", Options{Lease: given})
		matches(t, <-bodies, fmt.Sprintf(`"lease_ms":%d\b`, sent))
	}
	held := acquire(t, connect(t, direct), "x", Options{MinHold: 1, Wait: 50 * time.Second})
	_, err := connect(t, direct).Acquire(background, "x", Options{Wait: 1})
	fails(t, err, ErrNotAcquired)
	matches(t, err.Error(), "timed out after 1ms")
	ok(t, held.Close())
}

func TestInfinityMeansNoLimit(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	for _, endless := range []time.Duration{0, math.MaxInt64, 36_501 * 24 * time.Hour} {
		held := acquire(t, connect(t, store), "x y", Options{Wait: endless, MaxHold: endless})
		ok(t, held.Check())
		equal(t, claims(t, store), 1)
		ok(t, held.Close())
	}
}

func TestInvalidTimesAreRejectedByName(t *testing.T) {
	t.Parallel()
	client := connect(t, "http://127.0.0.1:1/")
	const endless = time.Duration(math.MaxInt64)
	wrong := []struct {
		name  string
		opts  func(time.Duration) Options
		times []time.Duration
	}{
		{"Wait", func(d time.Duration) Options { return Options{Wait: d} }, nil},
		{"Lease", func(d time.Duration) Options { return Options{Lease: d} },
			[]time.Duration{1, 49 * time.Millisecond, 48 * time.Hour, endless}},
		{"MaxHold", func(d time.Duration) Options { return Options{MaxHold: d} }, nil},
		{"MinHold", func(d time.Duration) Options { return Options{MinHold: d} }, []time.Duration{endless}},
		{"LockDelay", func(d time.Duration) Options { return Options{LockDelay: d} }, []time.Duration{endless}},
	}
	for _, each := range wrong {
		for _, given := range append(each.times, -1, math.MinInt64) {
			_, err := client.Acquire(background, "x", each.opts(given))
			fails(t, err, ErrUsage)
			matches(t, err.Error(), fmt.Sprintf("^%s must be between .*, not %v", each.name, given))
		}
	}
}

func TestALossDuringAPauseIsReportedAfterIt(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	process, lines, input := startChild(t, "waits-for-loss", store, 4*time.Second)
	equal(t, readLine(t, lines), "held")
	ok(t, process.Process.Signal(syscall.SIGSTOP))
	held := acquire(t, connect(t, store), "x y", Options{})
	ok(t, process.Process.Signal(syscall.SIGCONT))
	_, err := io.WriteString(input, "\n")
	ok(t, err)
	equal(t, readLine(t, lines), "lost")
	equal(t, readLine(t, lines), "true")
	ok(t, held.Check())
	ok(t, held.Close())
	// The clock counts a suspend of the machine, too.
	if clock := newBootClock(); clock.hasBoot {
		before := clock.now()
		clock.baseline -= time.Minute
		check(t, clock.now() > before+time.Minute, clock.now())
	}
}

func TestAnEvictedLockIsLost(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	held := acquire(t, connect(t, store), "x y", Options{Lease: 4 * time.Second})
	check(t, deadline(t, held).Before(time.Now().Add(4*time.Second)), "too late")
	called := make(chan struct{}, 9)
	held.OnLost(func() { called <- struct{}{} })
	inner, stop := held.WithContext(background)
	defer stop()
	succeeds(t, store, "evict", "x y")
	<-called
	<-inner.Done()
	<-held.Context().Done()
	equal(t, held.State(), StateLost)
	matches(t, held.Reason(), "evicted")
	// A callback that comes after the loss is called, too.
	held.OnLost(func() { called <- struct{}{} })
	<-called
	fails(t, held.Check(), ErrLost)
	fails(t, held.Close(), ErrLost)
	err := held.Close()
	fails(t, err, ErrLost)
	var problem *Error
	check(t, errors.As(err, &problem) && problem.Kind == "lost", err)
	held.OnLost(func() { t.Error("called after it was closed") })
	// A release does not call it.
	held = acquire(t, connect(t, store), "x y", Options{})
	held.OnLost(func() { t.Error("called after a release") })
	ok(t, held.Close())
	equal(t, held.Reason(), "")
}

// Faults of the network and the server.

func TestALostReplyNeitherLosesNorLeavesALock(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	var mu sync.Mutex
	counts := map[string]int{}
	store := newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		answer := forward()
		mu.Lock()
		defer mu.Unlock()
		counts[method]++
		if counts[method]%2 == 1 {
			// The first answer to each method, and then each second one.
			return nil
		}
		return answer
	}).store()
	client := connect(t, store)
	held := acquire(t, client, "x y", Options{Lease: 8 * time.Second})
	equal(t, claims(t, direct), 1)
	outlives(t, held, 8*time.Second)
	ok(t, held.Close())
	equal(t, held.State(), StateReleased)
	isFree(t, direct)
	other := acquire(t, connect(t, direct), "x y", Options{})
	isTaken(t, client, "x y", Options{})
	ok(t, other.Check())
	ok(t, other.Close())
	mu.Lock()
	defer mu.Unlock()
	check(t, counts["POST"] > 0 && counts["PUT"] > 0 && counts["DELETE"] > 0, counts)
}

func TestARepeatedRequestChangesNothing(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	client := connect(t, newProxy(t, direct, func(_, _ string, forward func() *reply) *reply {
		answer := forward()
		forward()
		return answer
	}).store())
	held := acquire(t, client, "x y", Options{Lease: 8 * time.Second})
	equal(t, claims(t, direct), 1)
	outlives(t, held, 8*time.Second)
	_, err := client.Acquire(background, "x y", Options{Wait: 300 * time.Millisecond})
	fails(t, err, ErrNotAcquired)
	equal(t, claims(t, direct), 1)
	ok(t, held.Close())
	equal(t, held.State(), StateReleased)
	isFree(t, direct)
}

// recordJoins returns a store that forwards each request, and the joins, which can be sent again.
func recordJoins(t *testing.T, direct string) (store string, joins chan func() *reply) {
	joins = make(chan func() *reply, 9)
	proxy := newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		if method == http.MethodPost {
			joins <- forward
		}
		return forward()
	})
	return proxy.store(), joins
}

func TestALateRequestMakesNoSecondHolder(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	store, joins := recordJoins(t, direct)
	held := acquire(t, connect(t, store), "x y", Options{Lease: 10 * time.Second})
	ok(t, held.Close())
	// The network delivers another copy of the join now.
	(<-joins)()
	equal(t, held.State(), StateReleased)
	equal(t, claims(t, direct), 1)
	// No client renews it.
	later := acquire(t, connect(t, direct), "x y", Options{})
	check(t, later.Token() > held.Token(), later)
	ok(t, later.Close())
}

func TestALateReplyNeverExtendsAHold(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	isOver := make(chan struct{})
	delivered := make(chan string, 99)
	var joins atomic.Int32
	store := newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		answer := forward()
		// All answers to renewals, and the first to a join.
		if method == http.MethodPut || method == http.MethodPost && joins.Add(1) == 1 {
			<-isOver
			delivered <- method
		}
		return answer
	}).store()
	// By a repeated join.
	held := acquire(t, connect(t, store), "x y", Options{Lease: 6 * time.Second})
	isLostInTime(t, held, 6*time.Second)
	// The server has renewed it, so no other client can hold it yet.
	equal(t, claims(t, direct), 1)
	close(isOver)
	check(t, <-delivered != "" && <-delivered != "", "not delivered")
	equal(t, held.State(), StateLost)
	err := held.Close()
	fails(t, err, ErrLost)
	matches(t, err.Error(), "expired")
	equal(t, held.State(), StateLost)
}

func TestAWaitLongerThanALeaseLeavesNoClaim(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	held := acquire(t, client, "x y", Options{})
	waiter := begun(func() error {
		next, err := client.Acquire(background, "x y", Options{Lease: 4 * time.Second})
		if err != nil {
			return err
		}
		return next.Close()
	})
	_, err := client.Acquire(background, "x y", Options{Lease: 4 * time.Second, Wait: 5 * time.Second})
	fails(t, err, ErrNotAcquired)
	equal(t, claims(t, store), 2)
	ok(t, held.Close())
	ok(t, <-waiter)
	isFree(t, store)
}

func TestAnAbandonedClaimIsReleased(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	held := acquire(t, connect(t, direct), "x y", Options{})
	left := make(chan int, 9)
	client := connect(t, newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		answer := forward()
		if method == http.MethodPost && claims(t, direct) < 3 {
			// Drops the answers until the client joins with another ID.
			return nil
		}
		if method == http.MethodDelete {
			left <- claims(t, direct)
		}
		return answer
	}).store())
	_, err := client.Acquire(background, "x y", Options{Lease: 4 * time.Second, Wait: 10 * time.Second})
	fails(t, err, ErrNotAcquired)
	close(left)
	// The first release is that of the abandoned claim.
	equal(t, <-left, 2)
	equal(t, <-left, 1)
	ok(t, held.Close())
}

func TestALateCopyOfAJoinIsReleased(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	store, joins := recordJoins(t, direct)
	held := acquire(t, connect(t, store), "x y", Options{})
	succeeds(t, direct, "evict", "x y")
	(<-joins)()
	equal(t, claims(t, direct), 1)
	// The next renewal finds another token.
	<-held.Context().Done()
	fails(t, held.Close(), ErrLost)
	isFree(t, direct)
}

func TestAnInvalidAnswerLeavesNoClaim(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	held := acquire(t, connect(t, direct), "x y", Options{})
	client := connect(t, newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		if method == http.MethodGet {
			return &reply{200, `{"status": "waiting", "lock": {"claims": [{"standing": "holding"}]}}`}
		}
		return forward()
	}).store())
	_, err := client.Acquire(background, "x y", Options{Wait: 300 * time.Millisecond})
	check(t, err != nil, "acquired")
	equal(t, claims(t, direct), 1)
	// A call that does not wait must not poll.
	isTaken(t, connect(t, newProxy(t, direct, func(method, _ string, forward func() *reply) *reply {
		if method == http.MethodPost {
			return &reply{202, `{"status": "waiting", "ahead": 1}`}
		}
		return forward()
	}).store()), "x y", Options{})
	ok(t, held.Close())
}

func TestAWaitThatEndsReportsTheLastError(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	ends := func(method string, answer *reply) *Error {
		client := connect(t, newProxy(t, direct, func(each, _ string, forward func() *reply) *reply {
			if each == method {
				return answer
			}
			return forward()
		}).store())
		_, err := client.Acquire(background, "x y", Options{Wait: 2 * time.Second})
		var problem *Error
		check(t, errors.As(err, &problem), err)
		return problem
	}
	full := &reply{429, `{"kind": "full", "detail": "over quota"}`}
	equal(t, ends(http.MethodPost, full).Kind, "full")
	equal(t, ends(http.MethodPost, nil).Kind, "unreachable")
	held := acquire(t, connect(t, direct), "x y", Options{})
	equal(t, ends(http.MethodPost, full).Kind, "full")
	equal(t, ends(http.MethodGet, nil).Kind, "unreachable")
	timeout := ends(http.MethodPost, nil)
	equal(t, timeout.Kind, "timeout")
	matches(t, timeout.Message, "held by")
	ok(t, held.Close())
}

func TestAWaitContinuesWhileTheServerIsFull(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	full := &reply{429, `{"kind": "full", "detail": "over quota", "retry_after_ms": 100}`}
	// Longer than the outage of a server that a wait survives.
	end := time.Now().Add(17 * time.Second)
	client := connect(t, newProxy(t, direct, func(_, _ string, forward func() *reply) *reply {
		if time.Now().Before(end) {
			return full
		}
		return forward()
	}).store())
	ok(t, acquire(t, client, "x y", Options{Wait: time.Minute}).Close())
}

func TestARequestLastsNoLongerThanTheWait(t *testing.T) {
	t.Parallel()
	isOver := make(chan struct{})
	client := connect(t, newProxy(t, newServer(t).url, func(_, _ string, _ func() *reply) *reply {
		<-isOver
		return nil
	}).store())
	_, err := client.Acquire(background, "x y", Options{Wait: 1900 * time.Millisecond})
	close(isOver)
	check(t, err != nil, "acquired")
	matches(t, err.Error(), `within 1s \[unreachable\]`)
}

func TestACallerDoesNotWaitForARejectedRelease(t *testing.T) {
	t.Parallel()
	denied := &reply{403, `{"kind": "denied", "detail": "no right to hold"}`}
	client := connect(t, newProxy(t, newServer(t).url, func(method, _ string, forward func() *reply) *reply {
		if method == http.MethodDelete {
			return denied
		}
		return forward()
	}).store())
	held := acquire(t, client, "x y", Options{})
	began := time.Now()
	ok(t, held.Close())
	check(t, time.Since(began) < farewell, "waited")
}

func TestAHoldSurvivesARestartOfTheServer(t *testing.T) {
	t.Parallel()
	path := "sqlite:" + t.TempDir() + "/locks.db"
	first := serve(t, path, "--listen", "127.0.0.1:0", "--no-auth")
	store := first.url
	client := connect(t, store)
	held := acquire(t, client, "x y", Options{Lease: 10 * time.Second})
	waiter := begun(func() error {
		next, err := client.Acquire(background, "x y", Options{})
		if err != nil {
			return err
		}
		return next.Close()
	})
	eventuallyClaims(t, store, 2)
	ok(t, first.process.Process.Kill())
	_ = first.process.Wait()
	parsed, err := url.Parse(store)
	ok(t, err)
	serve(t, path, "--listen", parsed.Host, "--no-auth")
	outlives(t, held, 10*time.Second)
	succeeds(t, store, "verify", held.Sequencer())
	ok(t, held.Close())
	equal(t, held.State(), StateReleased)
	ok(t, <-waiter)
	isFree(t, store)
}

func TestAPausedServerLosesTheLockBeforeItsLeaseEnds(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	client := connect(t, server.url)
	held := acquire(t, client, "x y", Options{Lease: 2 * time.Second})
	ok(t, server.process.Process.Signal(syscall.SIGSTOP))
	isLostInTime(t, held, 2*time.Second)
	fails(t, held.Check(), ErrLost)
	_, err := client.TryAcquire(background, "x y", Options{Lease: time.Second})
	fails(t, err, ErrUnavailable)
	ok(t, server.process.Process.Signal(syscall.SIGCONT))
	later := acquire(t, client, "x y", Options{})
	check(t, later.Token() > held.Token(), later)
	ok(t, later.Close())
}

func TestAReleaseIsRepeatedUntilTheServerAnswers(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	var releases atomic.Int32
	store := newProxy(t, server.url, func(method, _ string, forward func() *reply) *reply {
		if method != http.MethodDelete {
			return forward()
		}
		switch releases.Add(1) {
		case 1, 3:
			return &reply{502, "<html>"}
		case 2, 4:
			return nil
		}
		return forward()
	}).store()
	ok(t, acquire(t, connect(t, store), "x y", Options{}).Close())
	equal(t, releases.Load(), 5)
	isFree(t, server.url)
	// A caller does not wait for a server that is gone, for as long as the lease lasts.
	held := acquire(t, connect(t, server.url), "x y", Options{Lease: longLease})
	ok(t, server.process.Process.Kill())
	_ = server.process.Wait()
	ok(t, held.Close())
	equal(t, held.State(), StateReleased)
}

// serveTokens returns the URL of a server that accepts these tokens.
func serveTokens(t *testing.T, tokens ...string) string {
	t.Helper()
	var hashes []string
	for _, token := range tokens {
		hashes = append(hashes, fmt.Sprintf("%x", sha256.Sum256([]byte(token))))
	}
	identity := map[string]any{
		"name": "ci", "token_sha256": hashes, "prefixes": []string{"ci/"}, "rights": []string{"hold", "inspect"},
	}
	text, err := json.Marshal(map[string]any{"identities": []any{identity}})
	ok(t, err)
	file := filepath.Join(t.TempDir(), "tokens.json")
	ok(t, os.WriteFile(file, text, 0o600))
	return serve(t, "file:"+t.TempDir()+"/store", "--listen", "127.0.0.1:0", "--tokens", file).url
}

func TestARejectedTokenIsAnErrorWithoutTheToken(t *testing.T) {
	t.Parallel()
	address := serveTokens(t, "accepted")
	secrets := regexp.MustCompile("sekret|accepted|[0-9a-f]{32}")
	for _, each := range []struct{ name, query string }{{"ci/x", "token=sekret"}, {"ci/x", ""}, {"x", "token=accepted"}} {
		client := connect(t, address+"?"+each.query)
		_, err := client.Acquire(background, each.name, Options{})
		fails(t, err, ErrUnavailable)
		var problem *Error
		check(t, errors.As(err, &problem), err)
		equal(t, problem.Kind, "denied")
		text := fmt.Sprintf("%+v %#v %v %+v", err, err, client, client)
		check(t, !secrets.MatchString(text), text)
	}
	store := address + "?prefix=ci/&token=accepted"
	held := acquire(t, connect(t, store), "x", Options{})
	equal(t, held.Name(), "x")
	succeeds(t, store, "verify", held.Sequencer())
	ok(t, held.Close())
}

func replace(t *testing.T, file, text string) {
	t.Helper()
	ok(t, os.WriteFile(file+".new", []byte(text+"\n"), 0o600))
	ok(t, os.Rename(file+".new", file))
}

func TestATokenFileIsReadForEachRequest(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	client := connect(t, serveTokens(t, "first", "second")+"?token_file="+token)
	_, err := client.Acquire(background, "ci/x", Options{})
	fails(t, err, ErrUnavailable)
	matches(t, err.Error(), "cannot read token_file=.*no such file")
	replace(t, token, "first")
	held := acquire(t, client, "ci/x", Options{Lease: 8 * time.Second})
	replace(t, token, "second")
	outlives(t, held, 8*time.Second)
	ok(t, held.Close())
	held = acquire(t, client, "ci/x", Options{Lease: 4 * time.Second})
	replace(t, token, "wrong")
	<-held.Context().Done()
	matches(t, held.Reason(), "expired")
}

func TestInvalidUrlsAreRejectedWithoutTheirSecrets(t *testing.T) {
	for _, store := range []string{
		"", "h", "http:", "http:h", "http://", "http://a,a", "http://a,", "http://h:0", "http://h:65536",
		"http://user:sekret@h/", "http://sekret@h/", "http://h/?tokn=sekret", "http://h/?sekret",
		"http://h/?token=sek%0aret", "http://h/?token=sekret%", "http://h/?token=%ffsekret",
		"http://h/?ca=/x", "http://h/a%20b", "http://h/a&token=sekret", "http://h#sekret", "http://[::1/",
		"http+unix://h/socket", "http+unix://", "redis://:sekret@h/", "https://h?cert=/x", "https://h?ca=/nowhere",
		"https://h?cert=/nowhere&key=/nowhere", "https://h?ca=leasehold_test.go",
		"https://h?cert=leasehold_test.go&key=leasehold_test.go",
	} {
		_, err := Connect(store)
		check(t, errors.Is(err, ErrUsage), store)
		check(t, !regexp.MustCompile("(?s)sekret|sek.ret").MatchString(fmt.Sprintf("%v %#v", err, err)), store)
	}
	for _, store := range []string{
		"http://h", "http://a,b:1/base/?prefix=x", "https://[::1]:8484?token=x", "http+unix:///a/socket?prefix=x",
	} {
		ok(t, connect(t, store).Close())
	}
	t.Setenv("LEASEHOLD_STORE", "")
	_, err := ConnectFromEnv()
	fails(t, err, ErrUsage)
	file := filepath.Join(t.TempDir(), "store")
	t.Setenv("LEASEHOLD_STORE_FILE", file)
	_, err = ConnectFromEnv()
	fails(t, err, ErrUsage)
	replace(t, file, "http://h/?token=sekret")
	client, err := ConnectFromEnv()
	ok(t, err)
	equal(t, client.String(), "leasehold client of http://h:8484")
}

func TestTheNextReplicaTakesOver(t *testing.T) {
	t.Parallel()
	direct := newServer(t).url
	proxies := []*proxy{newProxy(t, direct, pass), newProxy(t, direct, pass)}
	store := "http://127.0.0.1:1," + proxies[0].host + "," + proxies[1].host
	held := acquire(t, connect(t, store), "x y", Options{Lease: 8 * time.Second})
	for _, one := range proxies {
		// One after the other answers nothing useful for longer than a lease.
		one.set(drop)
		outlives(t, held, 8*time.Second)
		one.set(pass)
	}
	ok(t, held.Close())
	equal(t, held.State(), StateReleased)
	isFree(t, direct)
}

func TestReplicasOfDifferentStoresAreRejected(t *testing.T) {
	t.Parallel()
	servers := []server{newServer(t), newServer(t)}
	proxies := []*proxy{newProxy(t, servers[0].url, pass), newProxy(t, servers[1].url, pass)}
	client := connect(t, "http://"+proxies[0].host+","+proxies[1].host)
	held, err := client.Acquire(background, "x y", Options{Lease: 5 * time.Second})
	for err != nil {
		// A replica that is slow is replaced, and the next one is rejected.
		held, err = client.Acquire(background, "x y", Options{Lease: 5 * time.Second})
	}
	// The one with which it began.
	first := 0
	if claims(t, servers[0].url) == 0 {
		first = 1
	}
	equal(t, claims(t, servers[first].url), 1)
	proxies[first].set(drop)
	<-held.Context().Done()
	isFree(t, servers[1-first].url)
}

func TestAllKindsAndTimesOfLocks(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	client := connect(t, store)
	const short = 100 * time.Millisecond
	readers := []*Held{
		acquire(t, client, "x y", Options{Kind: Reader}), acquire(t, client, "x y", Options{Kind: Reader}),
	}
	isTaken(t, client, "x y", Options{Kind: Writer})
	for _, each := range readers {
		ok(t, each.Close())
	}
	writer := acquire(t, client, "x y", Options{Kind: Writer})
	_, err := client.Acquire(background, "x y", Options{Kind: Reader, Wait: short})
	fails(t, err, ErrNotAcquired)
	ok(t, writer.Close())
	permits := []*Held{
		acquire(t, client, "s", Options{Kind: Semaphore, Size: 3, Permits: 2}),
		acquire(t, client, "s", Options{Kind: Semaphore, Size: 3}),
	}
	isTaken(t, client, "s", Options{Kind: Semaphore, Size: 3})
	for _, each := range permits {
		ok(t, each.Close())
	}
	held := acquire(t, client, "x y", Options{MaxHold: 500 * time.Millisecond})
	<-held.Context().Done()
	matches(t, held.Reason(), "MaxHold")
	eventuallyClaims(t, store, 0)
	began := time.Now()
	ok(t, acquire(t, client, "x y", Options{MinHold: 5 * time.Second}).Close())
	_, err = client.Acquire(background, "x y", Options{Wait: short})
	fails(t, err, ErrNotAcquired)
	matches(t, err.Error(), "in cooldown")
	later := acquire(t, client, "x y", Options{})
	check(t, time.Since(began) > 5*time.Second, "too early")
	ok(t, later.Check())
	ok(t, later.Close())
}

func TestAFrozenLockIsNotAcquired(t *testing.T) {
	t.Parallel()
	store := newServer(t).url
	succeeds(t, store, "freeze", "x y", "--for", "1h", "--reason", "repairs")
	client := connect(t, store)
	_, err := client.Acquire(background, "x y", Options{Wait: 200 * time.Millisecond})
	fails(t, err, ErrNotAcquired)
	matches(t, err.Error(), "repairs")
	_, err = client.TryAcquire(background, "x y", Options{})
	fails(t, err, ErrNotAcquired)
	matches(t, err.Error(), "repairs")
}

// certificate writes a certificate for 127.0.0.1 and its key to these files.
func certificate(t *testing.T, cert, key string) tls.Certificate {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ok(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	public, err := x509.CreateCertificate(rand.Reader, template, template, &secret.PublicKey, secret)
	ok(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(secret)
	ok(t, err)
	ok(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: public}), 0o600))
	ok(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600))
	pair, err := tls.LoadX509KeyPair(cert, key)
	ok(t, err)
	return pair
}

func TestHttpsNeedsTheRightCertificate(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	cert, key := path+"/server.pem", path+"/server.key"
	pair := certificate(t, cert, key)
	text, err := os.ReadFile(cert)
	ok(t, err)
	trusted := x509.NewCertPool()
	check(t, trusted.AppendCertsFromPEM(text), "no certificate")
	direct := newServer(t).url
	// The client has to show a certificate, too.
	config := &tls.Config{
		Certificates: []tls.Certificate{pair}, ClientCAs: trusted, ClientAuth: tls.RequireAndVerifyClientCert,
	}
	store := "https://" + newTLSProxy(t, direct, pass, config).host
	ours := "cert=" + cert + "&key=" + key
	held := acquire(t, connect(t, store+"?ca="+cert+"&"+ours), "x y", Options{Lease: 8 * time.Second})
	outlives(t, held, 8*time.Second)
	ok(t, held.Close())
	for _, query := range []string{ours, "ca=" + cert} {
		_, err := connect(t, store+"?"+query).TryAcquire(background, "x y", Options{})
		fails(t, err, ErrUnavailable)
	}
	isFree(t, direct)
	// Another host has the same certificate.
	other := strings.Replace(store, "127.0.0.1", "localhost", 1) + "?ca=" + cert + "&" + ours
	_, err = connect(t, other).TryAcquire(background, "x y", Options{})
	fails(t, err, ErrUnavailable)
	matches(t, err.Error(), "for another host")
}

func TestABusyProgramDoesNotHideALoss(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	token, pipe, link := path+"/token", path+"/pipe", path+"/link"
	replace(t, token, "accepted")
	client := connect(t, serveTokens(t, "accepted")+"?token_file="+token)
	held := acquire(t, client, "ci/x", Options{Lease: 4 * time.Second})
	// The goroutine of the lock is stuck at its next renewal: no other process opens this pipe.
	ok(t, syscall.Mkfifo(pipe, 0o600))
	ok(t, os.Link(pipe, link))
	ok(t, os.Rename(link, token))
	isLostInTime(t, held, 4*time.Second)
	matches(t, held.Reason(), "expired")
	fails(t, held.Check(), ErrLost)
	// Its next request reads a file again.
	replace(t, token, "accepted")
	if file, err := os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
		_, _ = io.WriteString(file, "accepted\n")
		ok(t, file.Close())
	}
	fails(t, held.Close(), ErrLost)
	// Not even these goroutines have to run: the clock is enough.
	keeper := &keeper{isHeld: true, state: StateHeld, deadline: now(), ends: forever, risk: forever, name: "x"}
	keeper.ctx, keeper.cancel = context.WithCancel(background)
	busy := &Held{keeper}
	fails(t, busy.Context().Err(), context.Canceled)
	equal(t, busy.State(), StateLost)
}
