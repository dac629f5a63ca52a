// Package leasehold provides distributed locks with fencing tokens, from a `leasehold serve`.
//
//	client, err := leasehold.Connect("http://locks.example:8484/?token_file=/etc/leasehold/token")
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//	held, err := client.Acquire(ctx, "backup", leasehold.Options{Wait: 10 * time.Second})
//	if err != nil {
//		return err
//	}
//	defer held.Close()
//	return backUp(held.Context(), held.Token()) // the resource rejects lower tokens than it has seen
//
// A goroutine for each lock renews it. [Held.Context] is canceled when the lock is lost. Also call [Held.Check] before
// critical steps, or send [Held.Token] with each write.
//
// All goroutines can use one client. One client for a program is enough.
package leasehold

// There are never two holders because of the network:
//
// - A lost reply, a repeated request: the client draws the claim's ID, and every call is about this claim. A second copy
//   of a join, a renewal or a release finds what the first one did. So after an error, the client repeats the call.
// - A late request: a renewal never joins. A join that arrives after its claim was released makes a claim that no client
//   renews or uses: it expires within its lease. An ID is used again neither after a release, nor after the server has
//   lost its claim, nor six seconds after its first join. The client releases the claim of an abandoned ID.
// - A late reply: a lease is counted from before its request was sent, so the delay only shortens it. The reply of a
//   request that was given up is dropped with its connection.
// - No reply: the lock is lost when the lease ends by this machine's clock, which is before it ends at the server.
//   `IsLost` and `Check` read the clock, so the loss is visible even if no other goroutine runs.

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	defaultPort = "8484"
	// The longest wait for an answer: of the only replica, and of one of several.
	answerLimit      = 5 * time.Second
	answerLimitOfOne = 1500 * time.Millisecond
	shortestLimit    = 20 * time.Millisecond
	// How long a join may take at least, even if the wait ends before.
	shortestJoin = time.Second
	// The first and the longest pause before a call is repeated.
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
	// The pause before the next step of a claim that has changed.
	shortPause = 10 * time.Millisecond
	// How long a claim is requested from a server that does not answer. A longer lease extends it.
	patience = 15 * time.Second
	// How long `Close` waits for the server. After that, releasing continues in the background.
	farewell = 5 * time.Second
	// The range of leases and the default.
	shortestLease = 50 * time.Millisecond
	longestLease  = 24 * time.Hour
	defaultLease  = 15 * time.Second
	// How long a queue position lasts without a call. The server has the same default.
	waiterLease = 6 * time.Second
	// The longest answer, in bytes.
	longestAnswer = 16 << 20
	// How many waiters at the front request the holders whenever their positions change.
	near = 3
	// The first and the longest pause before a candidate rejoins the queue.
	candidatePause        = 100 * time.Millisecond
	longestCandidatePause = 10 * time.Second
	// The longest time that has an end.
	century = 36_500 * 24 * time.Hour
	forever = time.Duration(math.MaxInt64)
)

const (
	reasonExpired = "its lease expired before a renewal was acknowledged"
	reasonGone    = "the store no longer has this hold (evicted, expired or its data was lost)"
	reasonMaxHold = "its MaxHold has elapsed"
)

// Client acquires locks of one lock service. All goroutines can use it.
type Client struct {
	service   *service
	transport *http.Transport

	mu       sync.Mutex
	keepers  map[*keeper]struct{}
	isClosed bool
}

// Connect returns a client of the lock service at this URL: http://host[:8484],host,…[/base][?parameters], https: or
// http+unix:///a/socket. Several hosts are the replicas of one service. It does not contact them yet.
//
// Parameters: token_file (file with the bearer token, read again for each request), token (the token itself), prefix
// (of all lock names), and with https: also ca (the only trusted authorities), cert and key (the client's certificate
// and its key). Files are in the PEM format.
//
// The error is [ErrUsage] if the URL is invalid or its certificates cannot be used.
func Connect(url string) (*Client, error) {
	service, err := parseURL(url)
	if err != nil {
		return nil, err
	}
	return &Client{service: service, transport: service.transport(), keepers: map[*keeper]struct{}{}}, nil
}

// ConnectFromEnv returns a client of the lock service that the environment names: LEASEHOLD_STORE contains the URL, or
// LEASEHOLD_STORE_FILE names a file with it.
//
// The error is [ErrUsage] if the URL is missing or invalid, or its certificates cannot be used.
func ConnectFromEnv() (*Client, error) {
	store := os.Getenv("LEASEHOLD_STORE")
	if file := os.Getenv("LEASEHOLD_STORE_FILE"); store == "" && file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, newError("config", "cannot read LEASEHOLD_STORE_FILE=%s: %s", file, why(err))
		}
		store = strings.TrimSpace(string(text))
	}
	if store == "" {
		return nil, newError("config", "missing store URL\nhint: set LEASEHOLD_STORE=http://host:8484/")
	}
	return Connect(store)
}

// Acquire acquires a lock. It waits in the queue of the lock until ctx is done, and at most for opts.Wait. A canceled
// wait leaves the queue in the background. After the lock is held, ctx has no effect on it.
//
// Errors: [ErrNotAcquired] if another client holds the lock for all of opts.Wait, [ErrUnavailable] if the service is
// unreachable or rejects the token, [ErrUsage] if the name or an option is invalid, [ErrClosed] if the client is
// closed, and ctx.Err().
func (c *Client) Acquire(ctx context.Context, name string, opts Options) (*Held, error) {
	times, err := opts.times()
	if err != nil {
		return nil, err
	}
	return c.acquire(ctx, name, opts, times)
}

// TryAcquire acquires a lock if it is free. It does not wait, so opts.Wait must be 0.
//
// Errors: those of [Client.Acquire], with [ErrNotAcquired] if another client holds the lock.
func (c *Client) TryAcquire(ctx context.Context, name string, opts Options) (*Held, error) {
	if opts.Wait != 0 {
		return nil, newError("config", "TryAcquire does not wait, but Wait is %v\nhint: call Acquire", opts.Wait)
	}
	times, err := opts.times()
	if err != nil {
		return nil, err
	}
	times.wait = 0
	return c.acquire(ctx, name, opts, times)
}

func (c *Client) acquire(ctx context.Context, name string, opts Options, times times) (*Held, error) {
	if !utf8.ValidString(name) {
		return nil, newError("invalid_name", "the name of a lock must be valid UTF-8, not %q", name)
	}
	k, err := newKeeper(c, name, opts, times)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("did not acquire %q: %w", name, err)
	}
	if !c.add(k) {
		return nil, ErrClosed
	}
	go k.run()
	return k.await(ctx)
}

func (c *Client) add(k *keeper) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.isClosed {
		c.keepers[k] = struct{}{}
	}
	return !c.isClosed
}

func (c *Client) remove(k *keeper) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.keepers, k)
}

// Elect leads whenever possible, until ctx is done. It waits until this process leads, calls work with the term,
// releases the lock when work returns, and rejoins the queue. It retries through outages of any length.
//
// The context of work is a copy of ctx that is also canceled when the term is lost. If work then returns [ErrLost] or
// context.Canceled, the process rejoins the queue. Any other error of work ends the election.
//
// Errors: that of work, ctx.Err(), [ErrUsage] if the name or an option is invalid, [ErrClosed] if the client is closed.
func (c *Client) Elect(
	ctx context.Context, name string, opts Options, work func(ctx context.Context, term *Held) error,
) error {
	pause := candidatePause
	for {
		began := now()
		term, err := c.Acquire(ctx, name, opts)
		isTemporary := errors.Is(err, ErrNotAcquired) || errors.Is(err, ErrUnavailable)
		if err == nil {
			err = lead(ctx, term, work)
		}
		if err != nil && !isTemporary {
			return err
		}
		if now()-began > longestCandidatePause {
			pause = candidatePause
		}
		pauseUntil(ctx, now()+pause)
		if err := ctx.Err(); err != nil {
			return err
		}
		pause = earlier(2*pause, longestCandidatePause)
	}
}

// lead returns nil if the process should rejoin the queue.
func lead(ctx context.Context, term *Held, work func(context.Context, *Held) error) error {
	// Its error is a loss, after which the process rejoins the queue.
	defer term.Close()
	inner, stop := term.WithContext(ctx)
	defer stop()
	err := work(inner, term)
	isByLoss := errors.Is(err, ErrLost) || errors.Is(err, context.Canceled) && ctx.Err() == nil
	if isByLoss && term.IsLost() {
		return nil
	}
	return err
}

// Close releases all locks of this client and ends all its waits. It waits up to a few seconds for the service. After
// that, releasing continues in the background. The error is always nil.
func (c *Client) Close() error {
	c.mu.Lock()
	c.isClosed = true
	all := make([]*keeper, 0, len(c.keepers))
	for k := range c.keepers {
		all = append(all, k)
	}
	c.mu.Unlock()
	for _, k := range all {
		k.release()
	}
	for _, k := range all {
		<-k.ended
	}
	c.transport.CloseIdleConnections()
	return nil
}

// String returns the hosts of the service, without secrets.
func (c *Client) String() string {
	return fmt.Sprintf("leasehold client of %s", strings.Join(c.service.origins, ","))
}

// Kind is a kind of lock.
type Kind int

// The kinds of locks.
const (
	// Mutex is a lock with one holder.
	Mutex Kind = iota
	// Reader shares a read-write lock with other readers.
	Reader
	// Writer holds a read-write lock alone.
	Writer
	// Semaphore takes permits of a semaphore.
	Semaphore
)

// Options are the kind and the times of a lock. The zero value is a mutex with the default times. Times are rounded to
// whole milliseconds, but never to 0.
type Options struct {
	// Wait is the maximum waiting time. 0, or more than 100 years: no limit.
	Wait time.Duration
	// Lease is the time until the lock of a crashed client is free, from 50 ms to 1 day. 0: 15 s.
	Lease time.Duration
	// MaxHold is the maximum time to hold. After that, the lock is lost. 0, or more than 100 years: no limit.
	MaxHold time.Duration
	// MinHold keeps the lock taken for this long, even if it is released earlier.
	MinHold time.Duration
	// LockDelay keeps the lock taken for this long after a crash.
	LockDelay time.Duration
	// Kind is the kind of the lock. All its clients use one kind, or are readers and writers.
	Kind Kind
	// Size is how many permits a semaphore has, at least 1. 0 for other kinds.
	Size int
	// Permits is how many permits of a semaphore to take. 0: one permit.
	Permits int
	// Label is a text that other clients see for this holder.
	Label string
	// OnWaiting is called when the wait begins and whenever the queue position has changed, by the goroutine that
	// waits. During a call, only the latest position is kept.
	OnWaiting func(Waiting)
}

// times are the times of the options, rounded. `forever` means no limit.
type times struct {
	wait, lease, maxHold, minHold, lockDelay time.Duration
}

func (o Options) times() (times, error) {
	t := times{endless(o.Wait), o.Lease, endless(o.MaxHold), o.MinHold, o.LockDelay}
	if t.lease == 0 {
		t.lease = defaultLease
	}
	const span = "0 and 100 years"
	for _, err := range []error{
		round("Wait", &t.wait, 0, forever, span),
		round("Lease", &t.lease, shortestLease, longestLease, "50 milliseconds and 1 day"),
		round("MaxHold", &t.maxHold, 0, forever, span),
		round("MinHold", &t.minHold, 0, century, span),
		round("LockDelay", &t.lockDelay, 0, century, span),
	} {
		if err != nil {
			return t, err
		}
	}
	return t, nil
}

func endless(limit time.Duration) time.Duration {
	if limit == 0 || limit > century {
		return forever
	}
	return limit
}

// round rounds the time to milliseconds. 0 has a meaning of its own, so a shorter time does not become 0.
func round(name string, given *time.Duration, least, most time.Duration, span string) error {
	if *given < least || *given > most {
		return newError("config", "%s must be between %s, not %v", name, span, *given)
	}
	if *given == 0 || *given == forever {
		return nil
	}
	*given = later(given.Round(time.Millisecond), time.Millisecond)
	return nil
}

// claim returns the claim of these options as the service knows it, without a name.
func (o Options) claim() (claim, error) {
	c := claim{Host: hostname(), PID: os.Getpid(), Label: o.Label}
	if !utf8.ValidString(o.Label) {
		return c, newError("config", "Label must be valid UTF-8, not %q", o.Label)
	}
	if o.Kind != Semaphore && (o.Size != 0 || o.Permits != 0) {
		return c, newError("config", "Size and Permits are for semaphores\nhint: Kind: leasehold.Semaphore")
	}
	switch o.Kind {
	case Mutex:
	case Reader:
		c.Kind, c.Weight = "rwlock", 1
	case Writer:
		c.Kind = "rwlock"
	case Semaphore:
		if o.Size < 1 {
			return c, newError("config", "Size must be at least 1, not %d", o.Size)
		}
		if o.Permits < 0 {
			return c, newError("config", "Permits must be at least 1, not %d", o.Permits)
		}
		c.Kind, c.Capacity, c.Weight = "semaphore", o.Size, o.Permits
		if o.Permits == 0 {
			c.Weight = 1
		}
	default:
		return c, newError("config", "invalid Kind %d\nhint: leasehold.Mutex", o.Kind)
	}
	return c, nil
}

// State is the state of a lock that was acquired.
type State int

// The states of a lock.
const (
	// StateHeld means that the lock is held.
	StateHeld State = iota + 1
	// StateAtRisk means that the lock is held, but was not renewed in time, or its MaxHold is almost over.
	StateAtRisk
	// StateLost means that the lock is lost: another client may hold it.
	StateLost
	// StateReleased means that the lock was released.
	StateReleased
)

// String returns the name of the state.
func (s State) String() string {
	switch s {
	case StateHeld:
		return "held"
	case StateAtRisk:
		return "at risk"
	case StateLost:
		return "lost"
	case StateReleased:
		return "released"
	}
	return fmt.Sprintf("State(%d)", int(s))
}

// Waiting is the position of a waiter.
type Waiting struct {
	// Ahead is how many claims are ahead in the queue.
	Ahead int64
	// HeldBy describes the holders, or the reason why the lock is unavailable. It is known when the wait begins, and
	// for the first three waiters. Otherwise it is empty.
	HeldBy string
	// Holders are the holders. It is empty if HeldBy is.
	Holders []Holder
}

// Holder is a holder of a lock.
type Holder struct {
	// Host is the machine of the holder, and PID its process.
	Host string
	PID  int64
	// Label is the label of the holder. It is empty without one.
	Label string
	// Token is the fencing token of the holder.
	Token int64
	// Permits is how many permits of a semaphore it has.
	Permits int64
	// Since is how long it has held the lock.
	Since time.Duration
}

// Held is a lock that was acquired, until it is released or lost. All goroutines can use it.
type Held struct {
	keeper *keeper
}

// Name returns the name of the lock, as it was passed to Acquire.
func (h *Held) Name() string {
	return h.keeper.name
}

// Token returns the fencing token. Each holder gets a higher one. Send it with each write, to a resource that rejects
// lower tokens than it has seen.
func (h *Held) Token() int64 {
	return h.keeper.token
}

// Sequencer returns the hold as a string, for `leasehold verify`.
func (h *Held) Sequencer() string {
	return h.keeper.sequencer
}

// State returns the state, by the clock of this machine. It does not contact the service.
func (h *Held) State() State {
	return h.keeper.observe()
}

// IsLost returns whether the lock was lost. It reads the clock, so a lease that has ended is noticed immediately, even
// after a pause of the whole process. It does not contact the service.
func (h *Held) IsLost() bool {
	return h.keeper.observe() == StateLost
}

// Check returns [ErrLost] if the lock was lost, and [ErrReleased] if it was released. Like [Held.IsLost], it reads the
// clock and does not contact the service.
func (h *Held) Check() error {
	if h.IsLost() {
		return h.keeper.loss()
	}
	if h.keeper.wasReleased() {
		return fmt.Errorf("%q: %w", h.Name(), ErrReleased)
	}
	return nil
}

// Reason returns why the lock was lost. It is empty if it was not lost.
func (h *Held) Reason() string {
	h.keeper.observe()
	h.keeper.mu.Lock()
	defer h.keeper.mu.Unlock()
	return h.keeper.reason
}

// Deadline returns the time until which the lock is guaranteed, even if no further renewal succeeds. The result is
// false without a limit.
func (h *Held) Deadline() (time.Time, bool) {
	h.keeper.mu.Lock()
	defer h.keeper.mu.Unlock()
	end := h.keeper.end()
	if end == forever {
		return time.Time{}, false
	}
	return time.Now().Add(end - now()), true
}

// Context returns a context that is canceled when the lock is lost or released. Its Err reads the clock. It does not
// depend on the context of Acquire.
func (h *Held) Context() context.Context {
	return heldContext{h.keeper.ctx, h.keeper}
}

// WithContext returns a copy of parent that is also canceled when the lock is lost or released. Call the function after
// the last use of the context.
func (h *Held) WithContext(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	go func() {
		select {
		case <-h.keeper.ctx.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// heldContext notices a loss when its error is read.
type heldContext struct {
	context.Context
	keeper *keeper
}

func (c heldContext) Err() error {
	c.keeper.observe()
	return c.Context.Err()
}

// OnLost adds a callback for the loss of the lock. A goroutine of its own calls it, once, and immediately if the lock
// is lost already. It is not called after Release or Close.
func (h *Held) OnLost(callback func()) {
	h.keeper.onLost(callback)
}

// Release releases the lock. It returns when the service has released it, after a few seconds, or when ctx is done. In
// the last two cases, releasing continues in the background. It can be repeated.
//
// Errors: [ErrLost] if the lock was lost before, and ctx.Err().
func (h *Held) Release(ctx context.Context) error {
	k := h.keeper
	k.release()
	select {
	case <-k.ended:
	case <-ctx.Done():
		if !k.hasEnded() {
			return fmt.Errorf("releasing %q continues in the background: %w", h.Name(), ctx.Err())
		}
	}
	if k.observe() == StateLost {
		return k.loss()
	}
	return nil
}

// Close releases the lock. It returns when the service has released it, or after a few seconds. Then releasing
// continues in the background. A second call has the same result.
//
// The error is [ErrLost] if the lock was lost before.
func (h *Held) Close() error {
	return h.Release(context.Background())
}

// String returns the name, the token and the state.
func (h *Held) String() string {
	return fmt.Sprintf("Held(%q, token %d, %v)", h.Name(), h.Token(), h.State())
}

// The classes of errors, for errors.Is.
var (
	// ErrNotAcquired means that another client held the lock during the whole wait, or an operator has frozen it.
	ErrNotAcquired = errors.New("the lock was not acquired")
	// ErrUnavailable means that the service is unreachable, cannot use its store, or rejects the token.
	ErrUnavailable = errors.New("the lock service is unavailable")
	// ErrLost means that the lock was held and then lost.
	ErrLost = errors.New("the lock was lost")
	// ErrUsage means that the URL, the name of the lock or an option is invalid.
	ErrUsage = errors.New("invalid use of the lock service")
	// ErrReleased means that the lock was released by this program.
	ErrReleased = errors.New("the lock was released")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("the client is closed")
)

// Error is an error of the client or the service. It wraps [ErrNotAcquired], [ErrUnavailable], [ErrLost] or [ErrUsage].
type Error struct {
	// Kind is the kind of the problem, as in the answers of the service, such as "contended", "unreachable" or
	// "denied".
	Kind string
	// Message describes the problem. It contains no secrets.
	Message string

	class error
	// Whether the server states when to retry.
	hasRetryTime bool
}

// Error returns the message.
func (e *Error) Error() string {
	return e.Message
}

// Unwrap returns the class of the error.
func (e *Error) Unwrap() error {
	return e.class
}

func newError(kind, format string, values ...any) *Error {
	class := ErrUnavailable
	switch kind {
	case "contended", "timeout", "lost":
		class = ErrNotAcquired
	case "invalid_name", "config", "unsupported", "mismatch":
		class = ErrUsage
	}
	return &Error{Kind: kind, Message: fmt.Sprintf(format, values...), class: class}
}

// isTransient returns whether the call is repeated after this error.
func (e *Error) isTransient() bool {
	return e.Kind == "unreachable" || e.Kind == "full" || e.Kind == "closed"
}

// why returns the reason of an error, without anything that was sent or received.
func why(err error) string {
	var number syscall.Errno
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var certificate x509.CertificateInvalidError
	var name *net.DNSError
	var operation *net.OpError
	var network net.Error
	switch {
	case errors.As(err, &number):
		return number.Error()
	case errors.As(err, &authority):
		return "unknown certificate authority"
	case errors.As(err, &host):
		return "the certificate is for another host"
	case errors.As(err, &certificate):
		return "invalid certificate"
	case errors.As(err, &name):
		return "unknown host"
	case errors.As(err, &operation) && operation.Op == "remote error":
		return "the server rejected the TLS connection"
	case errors.As(err, &network) && network.Timeout():
		return "timed out"
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return "the connection was closed"
	}
	return "the connection failed"
}

// clock is the clock of this program.
var clock = newBootClock()

// now returns the time since the start of this program, on a clock that cannot be set. On Linux it counts a suspend of
// the machine, too.
func now() time.Duration {
	return clock.now()
}

// bootClock adds the time during which the machine was suspended, which the clock of Go does not count.
type bootClock struct {
	start time.Time
	// nil on other systems than Linux.
	uptime *os.File
	// How far the uptime was ahead at the start.
	baseline time.Duration
	hasBoot  bool

	mu        sync.Mutex
	suspended time.Duration
}

// The resolution of the uptime.
const tick = 10 * time.Millisecond

func newBootClock() *bootClock {
	c := &bootClock{start: time.Now()}
	if file, err := os.Open("/proc/uptime"); err == nil {
		c.uptime = file
	}
	c.baseline, c.hasBoot = c.ahead()
	return c
}

func (c *bootClock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ahead, isKnown := c.ahead(); c.hasBoot && isKnown && ahead-c.baseline > 2*tick {
		c.suspended = later(c.suspended, ahead-c.baseline+tick)
	}
	return time.Since(c.start) + c.suspended
}

// ahead returns how far the uptime of Linux is ahead of the clock of Go. A pause between the two makes it smaller.
func (c *bootClock) ahead() (time.Duration, bool) {
	var text [64]byte
	// The file is shorter, so there is always an error. Without a file, the text is empty.
	length, _ := c.uptime.ReadAt(text[:], 0)
	first, _, _ := strings.Cut(string(text[:length]), " ")
	seconds, err := strconv.ParseFloat(first, 64)
	return time.Duration(seconds*float64(time.Second)) - time.Since(c.start), err == nil
}

// pauseUntil waits until this reading of the clock, or until ctx is done.
func pauseUntil(ctx context.Context, until time.Duration) {
	for left := until - now(); left > 0 && ctx.Err() == nil; left = until - now() {
		// A timer does not count a suspend, so not longer than a second.
		timer := time.NewTimer(earlier(left, time.Second))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// pauseAfter returns how long to wait before a call is repeated: at first not at all, because the connection was
// perhaps an old one.
func pauseAfter(failures int) time.Duration {
	if failures <= 1 {
		return 0
	}
	pause := firstPause
	for i := 2; i < failures && pause < longestPause; i++ {
		pause *= 2
	}
	return earlier(pause, longestPause)
}

func earlier(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}

func later(a, b time.Duration) time.Duration {
	if a > b {
		return a
	}
	return b
}

// milliseconds returns the time, or a century if it is longer.
func milliseconds(count int64) time.Duration {
	if count > century.Milliseconds() {
		return century
	}
	if count < -century.Milliseconds() {
		return -century
	}
	return time.Duration(count) * time.Millisecond
}

// shortly returns the time in the words of the command.
func shortly(t time.Duration) string {
	seconds := int64(t / time.Second)
	switch {
	case seconds < 1:
		return fmt.Sprintf("%dms", t.Milliseconds())
	case seconds < 60:
		return fmt.Sprintf("%ds", seconds)
	case seconds < 3600:
		return fmt.Sprintf("%dm %ds", seconds/60, seconds%60)
	}
	return fmt.Sprintf("%dh %dm", seconds/3600, seconds%3600/60)
}

// escaped returns the text with every byte as %XX that is not a letter or digit, also the dots.
func escaped(text string) string {
	var out strings.Builder
	for _, b := range []byte(text) {
		if b >= '0' && b <= '9' || b >= 'A' && b <= 'Z' || b >= 'a' && b <= 'z' {
			out.WriteByte(b)
		} else {
			fmt.Fprintf(&out, "%%%02X", b)
		}
	}
	return out.String()
}

// printable returns the text with every character as \u{x} that cannot be seen.
func printable(text string) string {
	var out strings.Builder
	for _, r := range text {
		if unicode.IsGraphic(r) {
			out.WriteRune(r)
		} else {
			fmt.Fprintf(&out, `\u{%x}`, r)
		}
	}
	return out.String()
}

// hostname returns what other clients see of this machine.
func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// service is a parsed URL. Errors show no part of it that may be a token.
type service struct {
	origins []string
	base    string
	// The path of a Unix socket. It is empty for TCP.
	socket    string
	prefix    string
	token     string
	tokenFile string
	tls       *tls.Config
}

func invalidURL(what string) *Error {
	return newError("config", "invalid store URL: %s", what)
}

func parseURL(text string) (*service, error) {
	scheme, rest, _ := strings.Cut(text, ":")
	if scheme != "http" && scheme != "https" && scheme != "http+unix" {
		return nil, invalidURL("this client connects to a lock service\nhint: http://host:8484/")
	}
	if !strings.HasPrefix(rest, "//") {
		return nil, invalidURL(`missing "//" after the scheme`)
	}
	place, query, _ := strings.Cut(rest[2:], "?")
	hosts, path, _ := strings.Cut(place, "/")
	parameters, err := parseParameters(query, scheme == "https")
	if err != nil {
		return nil, err
	}
	s := &service{prefix: parameters["prefix"], token: parameters["token"], tokenFile: parameters["token_file"]}
	if err := checkToken(s.token); err != nil {
		return nil, err
	}
	if scheme == "http+unix" {
		return s, s.parseSocket(hosts, path)
	}
	if err := s.parseHosts(scheme, hosts, path); err != nil {
		return nil, err
	}
	if scheme == "https" {
		s.tls, err = parseTLS(parameters)
	}
	return s, err
}

func parseParameters(query string, isTLS bool) (map[string]string, error) {
	known := []string{"prefix", "token", "token_file"}
	if isTLS {
		known = append(known, "ca", "cert", "key")
	}
	parameters := map[string]string{}
	if query == "" {
		return parameters, nil
	}
	for _, pair := range strings.Split(query, "&") {
		name, value, hasValue := strings.Cut(pair, "=")
		if !contains(known, name) {
			// A parameter without a name, or with a strange one, may be a token.
			if !hasValue || !parameterName.MatchString(name) {
				name = "without a name"
			}
			return nil, invalidURL(fmt.Sprintf("unknown parameter %s; known: %s", name, strings.Join(known, ", ")))
		}
		text, err := url.PathUnescape(value)
		if err != nil || !utf8.ValidString(text) {
			return nil, invalidURL("it contains an invalid escape")
		}
		parameters[name] = text
	}
	return parameters, nil
}

var (
	parameterName = regexp.MustCompile(`^[a-z_]{1,19}$`)
	basePath      = regexp.MustCompile(`^[A-Za-z0-9/._~-]*$`)
	hostAndPort   = regexp.MustCompile(`^(\[[^\]\[%\s]+\]|[^\]\[%:\s]+)(?::([0-9]{1,5}))?$`)
	tokenText     = regexp.MustCompile(`^[!-~]*$`)
)

func contains(all []string, wanted string) bool {
	for _, one := range all {
		if one == wanted {
			return true
		}
	}
	return false
}

func (s *service) parseSocket(hosts, path string) error {
	socket, err := url.PathUnescape(path)
	if err != nil || hosts != "" || socket == "" {
		return invalidURL("use http+unix:///a/socket")
	}
	s.socket = "/" + socket
	s.origins = []string{"http://localhost"}
	return nil
}

func (s *service) parseHosts(scheme, hosts, path string) error {
	if strings.Contains(hosts, "@") {
		return invalidURL("it cannot contain a user name or a password; use ?token_file=/path/to/file")
	}
	s.base = strings.TrimRight("/"+path, "/")
	if !basePath.MatchString(s.base) {
		return invalidURL("its path contains characters that leasehold does not send")
	}
	for _, host := range strings.Split(hosts, ",") {
		authority, err := parseHost(host)
		if err != nil {
			return err
		}
		origin := scheme + "://" + authority
		if contains(s.origins, origin) {
			return invalidURL("it names a replica twice")
		}
		s.origins = append(s.origins, origin)
	}
	return nil
}

// parseHost returns the host and the port of one replica.
func parseHost(text string) (string, error) {
	parts := hostAndPort.FindStringSubmatch(text)
	if parts == nil {
		return "", invalidURL("use http://host1,host2:8484/")
	}
	host, port := parts[1], parts[2]
	if port == "" {
		port = defaultPort
	}
	number, err := strconv.Atoi(port)
	if err != nil || number < 1 || number > 65535 {
		return "", invalidURL("use http://host1,host2:8484/")
	}
	authority := host + ":" + strconv.Itoa(number)
	parsed, err := url.Parse("http://" + authority)
	if err != nil || parsed.Host != authority {
		return "", invalidURL("a host name contains invalid characters")
	}
	return authority, nil
}

func checkToken(token string) error {
	if tokenText.MatchString(token) {
		return nil
	}
	return newError("config", "the token contains characters that a header cannot have")
}

// currentToken returns the token as it is now. It is empty without one.
func (s *service) currentToken() (string, error) {
	if s.tokenFile == "" {
		return s.token, nil
	}
	text, err := os.ReadFile(s.tokenFile)
	if err != nil {
		return "", newError("denied", "cannot read token_file=%s: %s", s.tokenFile, why(err))
	}
	token := strings.TrimSpace(string(text))
	return token, checkToken(token)
}

func parseTLS(parameters map[string]string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	cert, key := parameters["cert"], parameters["key"]
	if (cert == "") != (key == "") {
		return nil, invalidURL("cert= and key= need each other")
	}
	if ca := parameters["ca"]; ca != "" {
		text, err := readPEM("ca", ca)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, newError("config", "cannot use ca=%s: it has no certificate", ca)
		}
	}
	if cert != "" {
		pair, err := keyPair(cert, key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

func keyPair(cert, key string) (tls.Certificate, error) {
	public, err := readPEM("cert", cert)
	if err != nil {
		return tls.Certificate{}, err
	}
	private, err := readPEM("key", key)
	if err != nil {
		return tls.Certificate{}, err
	}
	pair, err := tls.X509KeyPair(public, private)
	if err != nil {
		return pair, newError("config", "cannot use cert=%s and key=%s: %v", cert, key, err)
	}
	return pair, nil
}

func readPEM(name, file string) ([]byte, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, newError("config", "cannot use %s=%s: %s", name, file, why(err))
	}
	return text, nil
}

// transport returns the connections of a client. The proxy settings of the environment are not for a lock service.
func (s *service) transport() *http.Transport {
	dialer := &net.Dialer{Timeout: answerLimit}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if s.socket != "" {
				return dialer.DialContext(ctx, "unix", s.socket)
			}
			return dialer.DialContext(ctx, network, address)
		},
		TLSClientConfig: s.tls,
		// No HTTP/2: one lost connection would delay all calls.
		TLSNextProto:           map[string]func(string, *tls.Conn) http.RoundTripper{},
		MaxIdleConnsPerHost:    64,
		IdleConnTimeout:        time.Minute,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 1 << 16,
	}
}

// claim is a claim as the service knows it.
type claim struct {
	Name          string `json:"name"`
	Kind          string `json:"kind,omitempty"`
	Weight        int    `json:"weight,omitempty"`
	Capacity      int    `json:"capacity,omitempty"`
	LeaseMS       int64  `json:"lease_ms"`
	WaiterLeaseMS int64  `json:"waiter_lease_ms"`
	LockDelayMS   int64  `json:"lock_delay_ms"`
	Host          string `json:"host"`
	PID           int    `json:"pid"`
	Label         string `json:"label"`
}

// query returns the claim as a query, without the fields that have their defaults.
func (c claim) query() string {
	pairs := []string{"name=" + escaped(c.Name)}
	addText := func(name, value string) {
		if value != "" {
			pairs = append(pairs, name+"="+escaped(value))
		}
	}
	addNumber := func(name string, value int64) {
		if value != 0 {
			pairs = append(pairs, fmt.Sprintf("%s=%d", name, value))
		}
	}
	addText("kind", c.Kind)
	addNumber("weight", int64(c.Weight))
	addNumber("capacity", int64(c.Capacity))
	addNumber("lease_ms", c.LeaseMS)
	addNumber("waiter_lease_ms", c.WaiterLeaseMS)
	addNumber("lock_delay_ms", c.LockDelayMS)
	addText("host", c.Host)
	addNumber("pid", int64(c.PID))
	addText("label", c.Label)
	return strings.Join(pairs, "&")
}

type request struct {
	method string
	path   string
	// The body, or nil.
	body any
	// Gets the fields of a successful answer, unless it is nil.
	into any
	// The longest wait for the answer.
	limit time.Duration
}

// answer is an answer of the server.
type answer struct {
	// A reading of the clock before the request was sent.
	sent time.Duration
	// The status of HTTP, or 0 without an answer.
	code int
	// nil if the call succeeded.
	err *Error
	// Whether the server has certainly not received the request.
	isUnsent bool
}

// noAnswer returns the result of a request that may have had an effect.
func noAnswer(reason string) answer {
	return answer{err: newError("unreachable", "no answer from the server%s [unreachable]", reason)}
}

// rejection returns the result of a request that the client itself does not send.
func rejection(err error) answer {
	var known *Error
	if !errors.As(err, &known) {
		known = newError("config", "invalid request: %v", err)
	}
	return answer{isUnsent: true, err: newError(known.Kind, "%s [%s]", known.Message, known.Kind)}
}

// problem returns the error of an answer that is not a success.
func problem(code int, body []byte) *Error {
	var fields struct {
		Kind, Detail, Title string
		RetryAfterMS        *int64 `json:"retry_after_ms"`
	}
	if err := json.Unmarshal(body, &fields); err == nil && fields.Kind != "" {
		what := fields.Detail
		if what == "" {
			what = fields.Title
		}
		problem := newError(fields.Kind, "%s [%s]", what, fields.Kind)
		problem.hasRetryTime = fields.RetryAfterMS != nil
		return problem
	}
	// Not from the service: perhaps from a proxy, whose text is not shown.
	kind := "config"
	switch {
	case code == 408 || code == 425 || code == 429 || code >= 500:
		kind = "unreachable"
	case code == 401 || code == 403 || code == 407:
		kind = "denied"
	}
	return newError(kind, "the server answered with the HTTP status %d [%s]", code, kind)
}

// replicas sends the requests of one lock to a replica of the service.
type replicas struct {
	service   *service
	transport *http.Transport
	// The replica in use, whether it was checked, and the store of the replicas.
	number    int
	isChecked bool
	identity  string
}

func newReplicas(c *Client) (*replicas, error) {
	count := len(c.service.origins)
	// Clients are spread over the replicas.
	number, err := rand.Int(rand.Reader, big.NewInt(int64(count)))
	if err != nil {
		return nil, newError("failed", "cannot draw a random number")
	}
	r := &replicas{service: c.service, transport: c.transport, number: int(number.Int64())}
	r.isChecked = count == 1
	return r, nil
}

func (r *replicas) next() {
	r.number = (r.number + 1) % len(r.service.origins)
	r.isChecked = len(r.service.origins) == 1
}

// send sends the request. When ctx is done, it returns without an answer.
func (r *replicas) send(ctx context.Context, q request) answer {
	sent := now()
	ctx, cancel := context.WithTimeout(ctx, q.limit)
	defer cancel()
	a := r.check(ctx, q.limit)
	if a.err == nil {
		a = r.exchange(ctx, q)
	}
	a.sent = sent
	isCanceled := errors.Is(ctx.Err(), context.Canceled)
	// Another replica may reach the store.
	if !isCanceled && a.err != nil && a.err.isTransient() && (a.code == 0 || a.code >= 500) {
		r.next()
	}
	return a
}

// check returns no error if this replica has the store of the others. Different stores would grant one lock twice.
func (r *replicas) check(ctx context.Context, limit time.Duration) answer {
	if r.isChecked {
		return answer{}
	}
	var store struct{ Identity string }
	a := r.exchange(ctx, request{method: http.MethodGet, path: "/v1/store", into: &store, limit: limit})
	a.isUnsent = true
	switch {
	case a.err == nil && store.Identity == "":
		a = noAnswer(": the response is incomplete")
		a.isUnsent = true
	case a.err == nil && r.identity != "" && store.Identity != r.identity:
		r.next()
		return rejection(newError("config", "the servers of the URL have different stores"))
	case a.err == nil:
		r.identity = store.Identity
		r.isChecked = true
	case a.code != 0 && a.err.Kind != "denied":
		a = noAnswer(fmt.Sprintf(": HTTP status %d", a.code))
		a.isUnsent = true
	}
	return a
}

// exchange sends the request to the replica in use.
func (r *replicas) exchange(ctx context.Context, q request) answer {
	var hasConnection atomic.Bool
	trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { hasConnection.Store(true) }}
	call, err := r.call(httptrace.WithClientTrace(ctx, trace), q)
	if err != nil {
		return rejection(err)
	}
	code, body, err := r.roundTrip(call)
	if err != nil {
		a := noAnswer(": " + why(err))
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			a = noAnswer(" within " + shortly(q.limit))
			// A firewall may have dropped all connections that were idle.
			r.transport.CloseIdleConnections()
		}
		a.isUnsent = !hasConnection.Load()
		return a
	}
	if code < 200 || code > 299 {
		return answer{code: code, err: problem(code, body)}
	}
	if q.into != nil && json.Unmarshal(body, q.into) != nil {
		return noAnswer(": the response is invalid")
	}
	return answer{code: code}
}

// call returns the request for HTTP.
func (r *replicas) call(ctx context.Context, q request) (*http.Request, error) {
	token, err := r.service.currentToken()
	if err != nil {
		return nil, err
	}
	var body io.Reader
	if q.body != nil {
		text, err := json.Marshal(q.body)
		if err != nil {
			return nil, errors.New("the body is invalid")
		}
		body = bytes.NewReader(text)
	}
	call, err := http.NewRequestWithContext(ctx, q.method, r.service.origins[r.number]+r.service.base+q.path, body)
	if err != nil {
		// Its text contains the claim's ID.
		return nil, errors.New("the path is invalid")
	}
	call.Header.Set("Accept", "application/json")
	call.Header.Set("Content-Type", "application/json")
	if token != "" {
		call.Header.Set("Authorization", "Bearer "+token)
	}
	return call, nil
}

// roundTrip does not follow redirects, which would send the token to another host.
func (r *replicas) roundTrip(call *http.Request) (int, []byte, error) {
	response, err := r.transport.RoundTrip(call)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, longestAnswer+1))
	if len(body) > longestAnswer {
		err = errors.New("the answer is too long")
	}
	return response.StatusCode, body, err
}

// The statuses of a claim.
const (
	statusHeld    = "held"
	statusWaiting = "waiting"
	statusLost    = "lost"
)

// claimAnswer is the answer to a call of a claim. Without an answer, its status is empty.
type claimAnswer struct {
	answer
	Status          string `json:"status"`
	Token           *int64 `json:"token"`
	Sequencer       string `json:"sequencer"`
	RemainingMS     *int64 `json:"remaining_ms"`
	Ahead           *int64 `json:"ahead"`
	HeadRemainingMS *int64 `json:"head_remaining_ms"`
}

func (a *claimAnswer) isComplete() bool {
	switch a.Status {
	case statusHeld:
		return a.Token != nil
	case statusWaiting:
		return a.Ahead != nil
	}
	return a.Status == statusLost
}

// remaining returns how long the claim lasts: forever if the store has no leases.
func (a *claimAnswer) remaining() time.Duration {
	if a.RemainingMS == nil {
		return forever
	}
	return milliseconds(*a.RemainingMS)
}

// deadline returns until when a grant is certain. Two clocks may run at different rates, so it is shortened by 1 % and
// 2 ms.
func (a *claimAnswer) deadline() time.Duration {
	remaining := a.remaining()
	if remaining == forever {
		return forever
	}
	return a.sent + remaining/100*99 - 2*time.Millisecond
}

// lockState is a lock with its holders, as the service lists it.
type lockState struct {
	Claims []lockClaim `json:"claims"`
	// The reason of an operator.
	Frozen *string `json:"frozen"`
}

type lockClaim struct {
	Standing    string `json:"standing"`
	Host        string `json:"host"`
	PID         int64  `json:"pid"`
	Label       string `json:"label"`
	Token       int64  `json:"token"`
	Weight      int64  `json:"weight"`
	SinceMS     int64  `json:"since_ms"`
	RemainingMS *int64 `json:"remaining_ms"`
}

// with returns the claims with this standing.
func (l *lockState) with(standing string) []lockClaim {
	var all []lockClaim
	for _, claim := range l.Claims {
		if claim.Standing == standing {
			all = append(all, claim)
		}
	}
	return all
}

func (l *lockState) holders() []Holder {
	var all []Holder
	for _, c := range l.with("holding") {
		since := milliseconds(c.SinceMS)
		all = append(all, Holder{Host: c.Host, PID: c.PID, Label: c.Label, Token: c.Token, Permits: c.Weight, Since: since})
	}
	return all
}

// heldBy returns words that follow "is": the holder, or why the lock is unavailable. It is empty if that is unknown.
func (l *lockState) heldBy() string {
	if holders := l.with("holding"); len(holders) > 0 {
		words := fmt.Sprintf("held by %s for %s", holders[0].holder(), shortly(milliseconds(holders[0].SinceMS)))
		if len(holders) > 1 {
			words += fmt.Sprintf(", and by %d more", len(holders)-1)
		}
		return words
	}
	departed := l.with("departed")
	if len(departed) == 0 {
		return ""
	}
	left := ""
	if departed[0].RemainingMS != nil {
		left = fmt.Sprintf(" for %s more", shortly(milliseconds(*departed[0].RemainingMS)))
	}
	if l.Frozen == nil {
		return fmt.Sprintf("in cooldown%s; last held by %s", left, departed[0].holder())
	}
	words := fmt.Sprintf("frozen%s by %s", left, printable(departed[0].Host))
	if *l.Frozen != "" {
		words += ": " + printable(*l.Frozen)
	}
	return words
}

func (c lockClaim) holder() string {
	words := fmt.Sprintf("%s pid %d", printable(c.Host), c.PID)
	if c.Label != "" {
		words += " (" + printable(c.Label) + ")"
	}
	return words
}

// keeper acquires, renews and releases a lock, on a goroutine of its own. The times that it stores are readings of the
// clock.
type keeper struct {
	client   *Client
	replicas *replicas
	name     string
	times    times
	// The longest wait for an answer.
	limit     time.Duration
	claim     claim
	onWaiting func(Waiting)

	// Done when the lock is lost, or the caller releases it.
	ctx    context.Context
	cancel context.CancelFunc
	// For the caller of `Acquire`: the latest position, and the end of the wait.
	waiting  chan Waiting
	acquired chan error
	// Closed when the lock was lost or released.
	ended chan struct{}
	once  sync.Once

	// Written before the lock is handed to the caller.
	token     int64
	sequencer string

	// For the goroutine of this keeper.
	id   string
	born time.Duration
	// Until when the server may have the claim without a further call.
	lives time.Duration
	// The claims of earlier IDs that the server may still have.
	abandoned []abandonedClaim
	// Until when the lock stays unavailable after a release.
	keepUntil time.Duration

	mu         sync.Mutex
	isReleased bool
	// Whether the clock can end the hold.
	isHeld bool
	// 0 before the lock was acquired.
	state     State
	reason    string
	callbacks []func()
	// Until when the hold is certain, when `MaxHold` ends, and from when the hold is at risk.
	deadline, ends, risk time.Duration
}

// abandonedClaim is a claim that this client does not use. Without a release, the server may have it until `lives`.
type abandonedClaim struct {
	id    string
	lives time.Duration
}

func newKeeper(c *Client, name string, opts Options, times times) (*keeper, error) {
	claim, err := opts.claim()
	if err != nil {
		return nil, err
	}
	replicas, err := newReplicas(c)
	if err != nil {
		return nil, err
	}
	claim.Name = c.service.prefix + name
	claim.LeaseMS = times.lease.Milliseconds()
	claim.WaiterLeaseMS = earlier(times.lease, waiterLease).Milliseconds()
	claim.LockDelayMS = times.lockDelay.Milliseconds()
	longest := answerLimit
	if len(c.service.origins) > 1 {
		longest = answerLimitOfOne
	}
	k := &keeper{
		client: c, replicas: replicas, name: name, times: times, claim: claim, onWaiting: opts.OnWaiting,
		limit:   later(earlier(longest, times.lease/3), shortestLimit),
		waiting: make(chan Waiting, 1), acquired: make(chan error, 1), ended: make(chan struct{}),
		deadline: forever, ends: forever, risk: forever,
	}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k, nil
}

// For the goroutines of the caller.

// await waits for the end of the wait, and calls `OnWaiting` meanwhile.
func (k *keeper) await(ctx context.Context) (*Held, error) {
	isHeld := false
	// Also if the callback panics.
	defer func() {
		if !isHeld {
			k.release()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("did not acquire %q: %w", k.name, ctx.Err())
		case waiting := <-k.waiting:
			k.onWaiting(waiting)
		case err := <-k.acquired:
			if err != nil {
				return nil, err
			}
			isHeld = true
			return &Held{k}, nil
		}
	}
}

// release releases the lock, or leaves the queue, in the background.
func (k *keeper) release() {
	k.mu.Lock()
	k.isReleased = true
	k.mu.Unlock()
	k.cancel()
}

func (k *keeper) wasReleased() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.isReleased
}

func (k *keeper) hasEnded() bool {
	select {
	case <-k.ended:
		return true
	default:
		return false
	}
}

// observe applies what the clock has changed, and returns the state.
func (k *keeper) observe() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.observeLocked()
}

func (k *keeper) observeLocked() State {
	if !k.isHeld {
		return k.state
	}
	moment := now()
	switch {
	case moment >= k.ends:
		k.loseLocked(reasonMaxHold)
	case moment >= k.deadline:
		k.loseLocked(reasonExpired)
	case moment >= k.risk:
		k.state = StateAtRisk
	default:
		k.state = StateHeld
	}
	return k.state
}

// end returns when the hold ends without a further renewal.
func (k *keeper) end() time.Duration {
	return earlier(k.deadline, k.ends)
}

func (k *keeper) lose(reason string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.loseLocked(reason)
}

func (k *keeper) loseLocked(reason string) {
	if k.state == StateLost {
		return
	}
	k.reason = reason
	k.state = StateLost
	k.isHeld = false
	k.cancel()
	if k.isReleased {
		return
	}
	for _, callback := range k.callbacks {
		go callback()
	}
}

func (k *keeper) loss() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return &Error{Kind: "lost", Message: fmt.Sprintf("lost %q: %s", k.name, k.reason), class: ErrLost}
}

func (k *keeper) onLost(callback func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.observeLocked() != StateLost {
		k.callbacks = append(k.callbacks, callback)
	} else if !k.isReleased {
		go callback()
	}
}

// watch notices what the clock changes, even if a request does not end.
func (k *keeper) watch() {
	for k.ctx.Err() == nil {
		pauseUntil(k.ctx, k.nextChange())
		k.observe()
	}
}

// nextChange returns when the clock changes the state. Renewals move it, so it is not far away.
func (k *keeper) nextChange() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	next := earlier(k.end(), now()+time.Second)
	if k.state == StateHeld {
		next = earlier(next, k.risk)
	}
	return next
}

// For the goroutine of this keeper.

func (k *keeper) run() {
	err := k.keep()
	k.leave(err)
	k.report(err)
	k.client.remove(k)
	k.cancel()
}

// keep holds the lock until it is released or lost, or returns why it was not acquired.
func (k *keeper) keep() error {
	grant, err := k.take()
	if err != nil {
		return err
	}
	k.hold(grant)
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.state == StateLost && k.reason == reasonMaxHold:
		// The holder may still work, so the lock stays unavailable for the lock delay.
		k.keepUntil = later(k.keepUntil, now()+k.times.lockDelay)
	case k.state == StateLost:
		// The lease ends what the server may have.
		k.lives = 0
	}
	return nil
}

// abandon stops using the claim. `withdraw` releases it.
func (k *keeper) abandon() {
	if k.lives > 0 {
		k.abandoned = append(k.abandoned, abandonedClaim{k.id, k.lives})
	}
	k.lives = 0
}

func (k *keeper) newClaim() error {
	k.abandon()
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return newError("failed", "cannot draw the ID of a claim")
	}
	k.id = hex.EncodeToString(id)
	k.born = now()
	return nil
}

// askClaim sends a join, a renewal or a poll. A poll renews the claim, too. When ctx is done, it returns without an
// answer.
func (k *keeper) askClaim(ctx context.Context, q request) claimAnswer {
	var fields claimAnswer
	q.into = &fields
	a := k.replicas.send(ctx, q)
	isRefused := a.code >= 400 && a.code < 500 && k.lives == 0
	if !a.isUnsent && !isRefused {
		k.lives = now() + k.times.lease
	}
	if a.err == nil && !fields.isComplete() {
		a.err = noAnswer(": the response is incomplete").err
	}
	if a.err != nil {
		return claimAnswer{answer: a}
	}
	fields.answer = a
	return fields
}

func (w *waiter) join() claimAnswer {
	mode, limit := "wait", earlier(w.limit, later(w.end-now(), shortestJoin))
	if w.times.wait == 0 {
		mode, limit = "try", w.limit
	}
	body := struct {
		ID    string `json:"id"`
		Mode  string `json:"mode"`
		Claim claim  `json:"claim"`
	}{w.id, mode, w.claim}
	q := request{method: http.MethodPost, path: "/v1/claims", body: body, limit: limit}
	return w.askClaim(context.Background(), q)
}

func (k *keeper) renew() claimAnswer {
	body := k.claim
	if k.ends < forever {
		// The lease ends soon after `MaxHold`, even if this process is paused.
		left := later(later(k.ends, k.keepUntil)-now(), 0).Milliseconds()
		if short := left + left/50 + 5; short < body.LeaseMS {
			body.LeaseMS = short
		}
	}
	path := "/v1/claims/" + k.id
	return k.askClaim(context.Background(), request{method: http.MethodPut, path: path, body: body, limit: k.limit})
}

// take waits for the lock, and returns the grant.
func (k *keeper) take() (claimAnswer, error) {
	if err := k.newClaim(); err != nil {
		return claimAnswer{}, err
	}
	w := &waiter{keeper: k, heard: now(), end: forever, place: -1, others: -1}
	if k.times.wait != forever {
		w.end = w.heard + k.times.wait
	}
	if err := w.checkMinHold(); err != nil {
		return claimAnswer{}, err
	}
	return w.run()
}

// waiter is a keeper before the lock is granted.
type waiter struct {
	*keeper
	step step
	// When the wait ends, when the last request ended, and when the service last answered.
	end, moment, heard time.Duration
	// How many calls failed, and how many polls were answered early, without a success since then.
	failures, early int
	// Why the last call failed. nil if it succeeded.
	problem *Error
	// The queue position, and how many claims the lock had then. -1: not known yet.
	place, others int64
}

// step is the next request of a waiter.
type step int

const (
	stepJoin step = iota
	stepRenew
	stepPoll
)

func (w *waiter) run() (claimAnswer, error) {
	for {
		a := w.request()
		if w.ctx.Err() != nil {
			return a, ErrClosed
		}
		w.moment = now()
		isGranted, pause, err := w.handle(a)
		if isGranted || err != nil {
			return a, err
		}
		if w.moment >= w.end && w.times.wait != 0 {
			return a, w.timeout()
		}
		pauseUntil(w.ctx, earlier(w.moment+pause, w.end))
	}
}

func (w *waiter) request() claimAnswer {
	switch w.step {
	case stepJoin:
		return w.join()
	case stepRenew:
		return w.renew()
	}
	return w.poll()
}

// handle returns whether the lock is granted, and otherwise how long to wait before the next request.
func (w *waiter) handle(a claimAnswer) (isGranted bool, pause time.Duration, err error) {
	if a.err != nil {
		pause, err = w.failed(a.err)
		return false, pause, err
	}
	w.heard = w.moment
	w.failures = 0
	w.problem = nil
	switch a.Status {
	case statusHeld:
		// If too little is left, it renews. A renewal never joins, so its answer says what became of the claim.
		w.step = stepRenew
		return a.deadline()-w.moment > w.times.lease/3, shortPause, nil
	case statusWaiting:
		pause, err = w.queued(a)
		return false, pause, err
	}
	w.step = stepJoin
	return false, shortPause, w.newClaim()
}

// failed returns how long to wait before the request is repeated, or the error that ends the wait.
func (w *waiter) failed(problem *Error) (time.Duration, error) {
	w.failures++
	w.problem = problem
	if problem.hasRetryTime {
		// A server that states when to retry is reachable.
		w.heard = w.moment
	}
	// A service that is full has answered, and the lock may be free.
	isFullAtEnd := problem.Kind == "full" && w.moment >= w.end
	isFinal := isFullAtEnd || w.moment-w.heard > later(patience, w.times.lease)
	if w.times.wait == 0 {
		isFinal = w.failures > len(w.replicas.service.origins)
	}
	if isFinal || !problem.isTransient() {
		return 0, problem
	}
	if w.step == stepJoin && w.moment-w.born > milliseconds(w.claim.WaiterLeaseMS) {
		// A queue position may have expired unseen. One claim never gets two positions.
		if err := w.newClaim(); err != nil {
			return 0, err
		}
	}
	return pauseAfter(w.failures), nil
}

// queued returns how long to wait before the next poll.
func (w *waiter) queued(a claimAnswer) (time.Duration, error) {
	if w.times.wait == 0 {
		return 0, newError("contended", "%q is not free [contended]", w.name)
	}
	w.withdraw()
	w.reportPlace(a)
	// A server that shuts down answers early. It must not be polled in a tight loop.
	isEarly := w.step == stepPoll && w.moment-a.sent < w.pollTime()/2
	w.step = stepPoll
	if !isEarly {
		w.early = 0
		return 0, nil
	}
	w.early++
	return pauseAfter(w.early + 1), nil
}

// checkMinHold returns an error if the store certainly does not support `MinHold`.
func (w *waiter) checkMinHold() error {
	if w.times.minHold == 0 {
		return nil
	}
	var store struct {
		Guarantees struct {
			MinHold bool `json:"min_hold"`
		}
	}
	a := w.replicas.send(w.ctx, request{method: http.MethodGet, path: "/v1/store", into: &store, limit: w.limit})
	if a.err == nil && !store.Guarantees.MinHold {
		return newError("unsupported", "this store does not support MinHold: it cannot keep a released lock unavailable")
	}
	return nil
}

func (w *waiter) poll() claimAnswer {
	wait := w.pollTime()
	path := fmt.Sprintf("/v1/claims/%s?%s&wait=%dms", w.id, w.claim.query(), wait.Milliseconds())
	return w.askClaim(w.ctx, request{method: http.MethodGet, path: path, limit: wait + w.limit})
}

// pollTime is short enough that the next replica is asked before the queue position expires.
func (w *waiter) pollTime() time.Duration {
	return later(earlier(milliseconds(w.claim.WaiterLeaseMS)/3, w.end-now()), 0)
}

// reportPlace reports the position if it has changed, and the holders to the first waiters.
func (w *waiter) reportPlace(a claimAnswer) {
	ahead := *a.Ahead
	if w.onWaiting == nil || ahead == w.place {
		return
	}
	lock := &lockState{}
	if w.others < 0 || a.HeadRemainingMS != nil || ahead-w.others < near {
		lock = w.lock(w.end)
	}
	w.place = ahead
	w.others = 1
	if count := int64(len(lock.Claims)); count > 1 {
		w.others = count
	}
	// Replaces a position that the caller has not received.
	select {
	case <-w.waiting:
	default:
	}
	w.waiting <- Waiting{Ahead: ahead, HeldBy: lock.heldBy(), Holders: lock.holders()}
}

// lock returns the lock with its holders. It is empty if the server does not answer soon.
func (w *waiter) lock(end time.Duration) *lockState {
	limit := later(earlier(earlier(time.Second, w.limit), end-now()), shortestLimit)
	var fields struct{ Lock *lockState }
	path := "/v1/locks/" + escaped(w.claim.Name) + "/holders"
	a := w.replicas.send(w.ctx, request{method: http.MethodGet, path: path, into: &fields, limit: limit})
	if a.err != nil || fields.Lock == nil {
		return &lockState{}
	}
	return fields.Lock
}

func (w *waiter) timeout() error {
	heldBy := w.lock(forever).heldBy()
	if heldBy == "" && w.problem != nil {
		return w.problem
	}
	if heldBy == "" {
		heldBy = "not free"
	}
	return newError("timeout", "timed out after %s: %q is %s", shortly(w.times.wait), w.name, heldBy)
}

// hold renews the lock until it is lost or the caller releases it.
func (k *keeper) hold(grant claimAnswer) {
	renewal := k.begin(grant)
	go k.watch()
	k.acquired <- nil
	k.withdraw()
	failures := 0
	for {
		pauseUntil(k.ctx, renewal)
		if k.ctx.Err() != nil {
			return
		}
		a := k.renew()
		switch {
		case a.err != nil:
			// Whether the lease was renewed is unknown, so the deadline stays.
			failures++
			renewal = now() + earlier(pauseAfter(failures), k.times.lease/10)
		case a.Status == statusHeld && *a.Token == k.token:
			failures = 0
			renewal = k.extend(a)
		default:
			if a.Status != statusLost {
				// A late copy of the join has made another claim with this ID.
				k.abandon()
			}
			k.loseNow()
		}
	}
}

// begin notes a grant, and returns when to renew it.
func (k *keeper) begin(grant claimAnswer) time.Duration {
	moment := now()
	k.token = *grant.Token
	k.sequencer = k.client.service.sequencer(grant.Sequencer, k.name)
	if k.times.minHold > 0 {
		k.keepUntil = moment + k.times.minHold
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.times.maxHold < forever {
		k.ends = moment + k.times.maxHold
	}
	k.deadline = grant.deadline()
	k.state = StateHeld
	k.isHeld = true
	return k.grantedLocked(grant)
}

// extend notes a renewal, unless the hold has ended, and returns when to renew it again.
func (k *keeper) extend(renewal claimAnswer) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.observeLocked() == StateLost {
		return 0
	}
	k.deadline = later(k.deadline, renewal.deadline())
	next := k.grantedLocked(renewal)
	k.observeLocked()
	return next
}

func (k *keeper) grantedLocked(a claimAnswer) time.Duration {
	remaining := a.remaining()
	k.risk = forever
	if remaining == forever {
		remaining = k.times.lease
	} else {
		k.risk = a.sent + remaining/3*2
	}
	if k.ends < forever {
		k.risk = earlier(k.risk, k.ends-earlier(k.times.lease, k.times.maxHold)/3)
	}
	return a.sent + remaining/3
}

// loseNow notes that the server has no such hold, unless the clock has ended it before.
func (k *keeper) loseNow() {
	k.observe()
	k.lose(reasonGone)
}

// leave releases the claim and the abandoned ones. It repeats the release until the lease is over. If the server does
// not answer, the caller does not wait that long.
func (k *keeper) leave(failure error) {
	k.mu.Lock()
	k.isHeld = false
	isHolder := k.state != 0 && k.state != StateLost
	k.mu.Unlock()
	began := now()
	for failures := 0; now() < k.lives || len(k.abandoned) > 0; {
		if now() < k.lives {
			hasLeft, code, err := k.askToLeave(k.id, k.keepUntil)
			if err == nil {
				k.lives = 0
				// If the call was repeated, an earlier copy may have released the lock.
				if isHolder && !hasLeft && failures == 0 {
					k.lose(reasonGone)
				}
			} else if code != 0 && code != 401 && !err.isTransient() {
				// The server has rejected the release, and not only the token, which may change. The caller does not
				// wait for the next attempts.
				k.report(failure)
			}
		}
		k.withdraw()
		failures++
		if now()-began >= farewell {
			k.report(failure)
		}
		pauseUntil(context.Background(), now()+pauseAfter(failures))
	}
}

// withdraw releases the abandoned claims, until a request fails.
func (k *keeper) withdraw() {
	for len(k.abandoned) > 0 {
		first := k.abandoned[0]
		if now() < first.lives {
			if _, _, err := k.askToLeave(first.id, 0); err != nil {
				return
			}
		}
		k.abandoned = k.abandoned[1:]
	}
}

// askToLeave returns whether the server had the claim, and the status of HTTP, which is 0 without an answer.
func (k *keeper) askToLeave(id string, keepUntil time.Duration) (bool, int, *Error) {
	path := "/v1/claims/" + id + "?" + k.claim.query()
	if keep := (keepUntil - now()).Milliseconds(); keep > 0 {
		path += fmt.Sprintf("&keep_ms=%d", keep)
	}
	var fields struct{ Left bool }
	q := request{method: http.MethodDelete, path: path, into: &fields, limit: k.limit}
	a := k.replicas.send(context.Background(), q)
	return fields.Left, a.code, a.err
}

// report reports the end, once.
func (k *keeper) report(failure error) {
	k.once.Do(func() {
		k.mu.Lock()
		isWaiting := k.state == 0
		if !isWaiting && k.state != StateLost {
			k.state = StateReleased
		}
		k.mu.Unlock()
		if isWaiting {
			k.acquired <- failure
		}
		close(k.ended)
	})
}

// sequencer returns the sequencer as all clients of this URL write it. To them, a prefix is part of the store.
func (s *service) sequencer(text, name string) string {
	parts := strings.Split(text, ":")
	if s.prefix == "" || len(parts) != 5 {
		return text
	}
	parts[3] += escaped("/" + s.prefix)
	parts[4] = escaped(name)
	return strings.Join(parts, ":")
}
