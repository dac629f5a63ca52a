package leasehold;

import java.io.ByteArrayOutputStream;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.net.ConnectException;
import java.net.InetAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpConnectTimeoutException;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodySubscriber;
import java.net.http.HttpTimeoutException;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.SecureRandom;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.security.spec.InvalidKeySpecException;
import java.security.spec.PKCS8EncodedKeySpec;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Deque;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Consumer;
import java.util.regex.Pattern;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/**
 * Distributed locks with fencing tokens, from a {@code leasehold serve}.
 *
 * <pre>{@code
 * try (var client = Leasehold.connect("http://locks.example:8484/?token_file=/etc/leasehold/token")) {
 *     try (var held = client.acquire("backup", new Leasehold.Options().wait(Duration.ofSeconds(10)))) {
 *         backUp(held.token()); // the resource rejects lower tokens than it has seen
 *     }
 * }
 * }</pre>
 *
 * <p>A daemon thread for each lock renews it. Nothing stops your threads when a lock is lost: call {@link Held#check()}
 * before critical steps, pass a callback to {@link Held#onLost}, or send {@link Held#token()} with each write.
 *
 * <p>A client can be used by all threads. One client for a program is enough.
 */
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
//   `isLost` and `check` read the clock, so the loss is visible even if no other thread runs.
public final class Leasehold implements AutoCloseable {
    private static final int PORT = 8484;
    private static final long MILLISECOND = 1_000_000;
    private static final long SECOND = 1_000 * MILLISECOND;
    private static final long FOREVER = Long.MAX_VALUE;
    // The longest wait for an answer: of the only replica, and of one of several.
    private static final long ANSWER = 5 * SECOND;
    private static final long ANSWER_OF_ONE = 1_500 * MILLISECOND;
    private static final long SHORTEST_ANSWER = 20 * MILLISECOND;
    // The first and the longest pause before a call is repeated.
    private static final long PAUSE = 50 * MILLISECOND;
    private static final long LONGEST_PAUSE = SECOND;
    // How long a claim is requested from a server that does not answer. A longer lease extends it.
    private static final long PATIENCE = 15 * SECOND;
    // How long a join may take at least, even if the wait ends before.
    private static final long SHORTEST_JOIN = SECOND;
    // How long `close` waits for the server. After that, releasing continues in the background.
    private static final long FAREWELL = 5 * SECOND;
    // The range of leases and the default, in milliseconds.
    private static final long SHORTEST_LEASE = 50;
    private static final long LONGEST_LEASE = 86_400_000;
    private static final long LEASE = 15_000;
    // How long a queue position lasts without a call, in milliseconds. The server has the same default.
    private static final long WAITER_LEASE = 6_000;
    // The longest answer, in bytes.
    private static final int LONGEST_ANSWER = 16 << 20;
    // How many waiters at the front ask for the holders whenever their positions change.
    private static final long NEAR = 3;
    // The first and the longest pause before a candidate rejoins the queue.
    private static final long CANDIDATE_PAUSE = 100 * MILLISECOND;
    private static final long LONGEST_CANDIDATE_PAUSE = 10 * SECOND;

    // After these, the call is repeated.
    private static final Set<String> TRANSIENT = Set.of("unreachable", "full", "closed");
    private static final Set<String> NOT_ACQUIRED = Set.of("contended", "timeout", "lost");
    private static final Set<String> USAGE = Set.of("invalid_name", "config", "unsupported", "mismatch");

    private static final String EXPIRED = "its lease expired before a renewal was acknowledged";
    private static final String GONE = "the store no longer has this hold (evicted, expired or its data was lost)";
    private static final String MAX_HOLD = "its maxHold has elapsed";

    private static final SecureRandom RANDOM = new SecureRandom();

    private final Url url;
    private HttpClient http;
    private long connected;
    private final Set<Keeper> keepers = ConcurrentHashMap.newKeySet();
    private volatile boolean isClosed;

    private Leasehold(Url url) {
        this.url = url;
        reconnect(null);
    }

    private synchronized HttpClient http() {
        return http;
    }

    /**
     * Lets all later requests use new connections, if they would use those of this one. A firewall may have dropped all
     * connections that were idle.
     */
    private synchronized void reconnect(HttpClient used) {
        if (http != used || http != null && now() - connected < SECOND) {
            return;
        }
        connected = now();
        // The JVM's proxy settings are not for a lock service.
        var builder = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).proxy(HttpClient.Builder.NO_PROXY);
        if (url.tls != null) {
            builder.sslContext(url.tls);
        }
        http = builder.build();
    }

    /**
     * Returns a client of the lock service at this URL: {@code http://host[:8484],host,…[/base][?parameters]}, or
     * {@code https:}. Several hosts are the replicas of one service. It does not contact them yet.
     *
     * <p>Parameters: {@code token_file} (file with the bearer token, read again for each request), {@code token}
     * (the token itself), {@code prefix} (of all lock names), and with {@code https:} also {@code ca} (the only trusted
     * authorities), {@code cert} and {@code key} (the client's certificate and its PKCS #8 key). Files are in the PEM
     * format.
     *
     * @param url the URL of the service
     * @return the client
     * @throws IllegalArgumentException if the URL is invalid or its certificates cannot be used
     */
    public static Leasehold connect(String url) {
        return new Leasehold(new Url(Objects.requireNonNull(url, "url")));
    }

    /**
     * Returns a client of the lock service that the environment names: {@code LEASEHOLD_STORE} contains the URL, or
     * {@code LEASEHOLD_STORE_FILE} names a file with it.
     *
     * @return the client
     * @throws IllegalArgumentException if the URL is missing or invalid, or its certificates cannot be used
     */
    public static Leasehold connect() {
        String url = System.getenv("LEASEHOLD_STORE");
        String file = System.getenv("LEASEHOLD_STORE_FILE");
        if ((url == null || url.isEmpty()) && file != null) {
            try {
                url = new String(read(file, 1 << 16), StandardCharsets.UTF_8).strip();
            } catch (IOException error) {
                throw new IllegalArgumentException("cannot read LEASEHOLD_STORE_FILE=" + file + ": " + why(error));
            }
        }
        if (url == null || url.isEmpty()) {
            throw new IllegalArgumentException("missing store URL\nhint: set LEASEHOLD_STORE=http://host:8484/");
        }
        return connect(url);
    }

    /**
     * Acquires a mutex. Waits for it without limit.
     *
     * @param name the name of the lock
     * @return the lock, until it is closed
     * @throws InterruptedException if this thread is interrupted. It leaves the queue.
     * @throws UnavailableException if the service is unreachable, or rejects the token
     * @throws UsageException if the service rejects the name
     */
    public Held acquire(String name) throws InterruptedException {
        return acquire(name, new Options());
    }

    /**
     * Acquires a lock.
     *
     * @param name the name of the lock
     * @param options the kind and the times of the lock
     * @return the lock, until it is closed
     * @throws InterruptedException if this thread is interrupted. It leaves the queue.
     * @throws NotAcquiredException if another client holds the lock for all of {@link Options#wait}
     * @throws UnavailableException if the service is unreachable, or rejects the token
     * @throws UsageException if the service rejects the name or an option
     * @throws IllegalStateException if this client is closed
     */
    public Held acquire(String name, Options options) throws InterruptedException {
        return acquire(name, new Options(options), options.wait == null ? FOREVER : options.wait);
    }

    /**
     * Acquires a mutex if it is free. Does not wait.
     *
     * @param name the name of the lock
     * @return the lock, or empty if another client holds it
     * @throws InterruptedException if this thread is interrupted
     * @throws UnavailableException if the service is unreachable, or rejects the token
     * @throws UsageException if the service rejects the name
     */
    public Optional<Held> tryAcquire(String name) throws InterruptedException {
        return tryAcquire(name, new Options());
    }

    /**
     * Acquires a lock if it is free. Does not wait, unless the options have a {@link Options#wait}.
     *
     * @param name the name of the lock
     * @param options the kind and the times of the lock
     * @return the lock, or empty if another client holds it
     * @throws InterruptedException if this thread is interrupted. It leaves the queue.
     * @throws UnavailableException if the service is unreachable, or rejects the token
     * @throws UsageException if the service rejects the name or an option
     * @throws IllegalStateException if this client is closed
     */
    public Optional<Held> tryAcquire(String name, Options options) throws InterruptedException {
        try {
            return Optional.of(acquire(name, new Options(options), options.wait == null ? 0 : options.wait));
        } catch (NotAcquiredException error) {
            return Optional.empty();
        }
    }

    private Held acquire(String name, Options options, long wait) throws InterruptedException {
        if (!StandardCharsets.UTF_8.newEncoder().canEncode(Objects.requireNonNull(name, "name"))) {
            throw new IllegalArgumentException("name must be Unicode text");
        }
        if (Thread.interrupted()) {
            throw new InterruptedException();
        }
        var keeper = new Keeper(this, name, options, wait);
        keepers.add(keeper);
        try {
            if (isClosed) {
                throw new IllegalStateException("the client is closed");
            }
            keeper.start();
        } catch (Throwable error) {
            keepers.remove(keeper);
            throw error;
        }
        try {
            return keeper.await();
        } catch (Throwable error) {
            keeper.release();
            throw error;
        }
    }

    /**
     * Leads whenever possible, until this thread is interrupted. Waits until this process leads, calls {@code work} with
     * the term, releases the lock when {@code work} returns, and rejoins the queue. Retries through outages of any
     * length.
     *
     * <p>{@code work} should return when the term {@linkplain Held#isLost() is lost}. A {@link LostException} that it
     * throws then has the same effect. Any other exception ends the election.
     *
     * @param <E> what {@code work} throws
     * @param name the name of the lock
     * @param options the times of the lock
     * @param work the work of a leader
     * @throws E if {@code work} throws it
     * @throws InterruptedException if this thread is interrupted. It leaves the queue.
     * @throws UsageException if the service rejects the name or an option
     * @throws IllegalStateException if this client is closed
     */
    public <E extends Exception> void elect(String name, Options options, Work<E> work) throws E, InterruptedException {
        long pause = CANDIDATE_PAUSE;
        while (true) {
            long began = now();
            Held term = null;
            try {
                term = acquire(name, options);
            } catch (NotAcquiredException | UnavailableException error) {
                // It retries.
            }
            if (term != null) {
                lead(term, work);
            }
            if (now() - began > LONGEST_CANDIDATE_PAUSE) {
                pause = CANDIDATE_PAUSE;
            }
            TimeUnit.NANOSECONDS.sleep(pause);
            pause = Math.min(2 * pause, LONGEST_CANDIDATE_PAUSE);
        }
    }

    private static <E extends Exception> void lead(Held term, Work<E> work) throws E {
        try {
            work.lead(term);
        } catch (LostException error) {
            if (!term.isLost()) {
                throw error;
            }
        } finally {
            try {
                term.close();
            } catch (LostException error) {
                // The candidate rejoins the queue anyway.
            }
        }
    }

    /**
     * Releases all locks of this client, and ends all its waits. Waits a few seconds for the service; after that,
     * releasing continues in the background.
     */
    @Override
    public void close() {
        isClosed = true;
        var all = List.copyOf(keepers);
        all.forEach(Keeper::release);
        all.forEach(Keeper::awaitEnd);
    }

    /** Returns the hosts of the service, without secrets. */
    @Override
    public String toString() {
        return "Leasehold" + url.origins;
    }

    /**
     * The work of a leader.
     *
     * @param <E> what it throws
     */
    @FunctionalInterface
    public interface Work<E extends Exception> {
        /**
         * Works until the term is lost, or as long as this process wants to lead.
         *
         * @param term the lock, whose token is the number of the term
         * @throws E to end the election
         */
        void lead(Held term) throws E;
    }

    /** The kind and the times of a lock. Times are rounded to whole milliseconds, but never to 0. */
    public static final class Options {
        private static final Duration CENTURY = Duration.ofDays(36_500);
        private static final Duration SHORTEST = Duration.ofMillis(SHORTEST_LEASE);
        private static final Duration LONGEST = Duration.ofMillis(LONGEST_LEASE);

        // In milliseconds. FOREVER: no limit. null: the default.
        private Long wait;
        private long lease = LEASE;
        private long maxHold = FOREVER;
        private long minHold;
        private long lockDelay;
        private String kind;
        private long capacity = 1;
        private long permits;
        private String label = "";
        private Consumer<Waiting> onWaiting;

        /** Makes the options of a mutex, with the default times. */
        public Options() {}

        private Options(Options other) {
            wait = other.wait;
            lease = other.lease;
            maxHold = other.maxHold;
            minHold = other.minHold;
            lockDelay = other.lockDelay;
            kind = other.kind;
            capacity = other.capacity;
            permits = other.permits;
            label = other.label;
            onWaiting = other.onWaiting;
        }

        /**
         * Sets the maximum waiting time. Zero: do not wait.
         *
         * @param time the time; more than 100 years mean no limit, which is the default
         * @return these options
         */
        public Options wait(Duration time) {
            wait = isEndless(time) ? FOREVER : milliseconds("wait", time);
            return this;
        }

        /**
         * Sets the time until the lock of a crashed client is free.
         *
         * @param time 50 ms to 1 day; the default is 15 s
         * @return these options
         */
        public Options lease(Duration time) {
            lease = milliseconds("lease", time, SHORTEST, LONGEST, "between 50 milliseconds and 1 day");
            return this;
        }

        /**
         * Sets the maximum time to hold. After that, the lock is lost.
         *
         * @param time the time; more than 100 years mean no limit, which is the default
         * @return these options
         */
        public Options maxHold(Duration time) {
            if (time != null && time.isZero()) {
                throw new IllegalArgumentException("maxHold must be greater than zero");
            }
            maxHold = isEndless(time) ? FOREVER : milliseconds("maxHold", time);
            return this;
        }

        /**
         * Keeps the lock taken for this long, even if it is released earlier.
         *
         * @param time the time; the default is zero
         * @return these options
         */
        public Options minHold(Duration time) {
            minHold = milliseconds("minHold", time);
            return this;
        }

        /**
         * Keeps the lock taken for this long after a crash.
         *
         * @param time the time; the default is zero
         * @return these options
         */
        public Options lockDelay(Duration time) {
            lockDelay = milliseconds("lockDelay", time);
            return this;
        }

        /**
         * Makes this a reader of a read-write lock.
         *
         * @return these options
         */
        public Options read() {
            return kind("read", 1, 1);
        }

        /**
         * Makes this a writer of a read-write lock.
         *
         * @return these options
         */
        public Options write() {
            return kind("write", 1, 0);
        }

        /**
         * Makes this one permit of a semaphore.
         *
         * @param size how many permits the semaphore has
         * @return these options
         */
        public Options semaphore(int size) {
            return semaphore(size, 1);
        }

        /**
         * Makes this several permits of a semaphore.
         *
         * @param size how many permits the semaphore has
         * @param permits how many permits to take
         * @return these options
         */
        public Options semaphore(int size, int permits) {
            if (size < 1) {
                throw new IllegalArgumentException("size must be at least 1, not " + size);
            }
            if (permits < 1) {
                throw new IllegalArgumentException("permits must be at least 1, not " + permits);
            }
            return kind("semaphore", size, permits);
        }

        /**
         * Sets a text that other clients see for this holder.
         *
         * @param text the text
         * @return these options
         */
        public Options label(String text) {
            if (!StandardCharsets.UTF_8.newEncoder().canEncode(Objects.requireNonNull(text, "label"))) {
                throw new IllegalArgumentException("label must be Unicode text");
            }
            label = text;
            return this;
        }

        /**
         * Sets a callback for when the wait begins and whenever the queue position changes. The thread that waits calls
         * it. An exception of the callback ends the wait.
         *
         * @param callback gets the queue position
         * @return these options
         */
        public Options onWaiting(Consumer<Waiting> callback) {
            onWaiting = Objects.requireNonNull(callback, "onWaiting");
            return this;
        }

        private Options kind(String kind, long capacity, long permits) {
            if (this.kind != null) {
                throw new IllegalArgumentException("read, write and semaphore cannot be used together");
            }
            this.kind = kind;
            this.capacity = capacity;
            this.permits = permits;
            return this;
        }

        private static long milliseconds(String name, Duration time) {
            return milliseconds(name, time, Duration.ZERO, CENTURY, "between 0 milliseconds and 100 years");
        }

        private static boolean isEndless(Duration time) {
            return time != null && time.compareTo(CENTURY) > 0;
        }

        private static long milliseconds(String name, Duration time, Duration least, Duration most, String range) {
            Objects.requireNonNull(time, name);
            if (time.compareTo(least) < 0 || time.compareTo(most) > 0) {
                throw new IllegalArgumentException(name + " must be " + range + ", not " + time);
            }
            // 0 has a meaning of its own, so a shorter time than a millisecond does not become 0.
            long rounded = time.plusNanos(MILLISECOND / 2).toMillis();
            return rounded == 0 && !time.isZero() ? 1 : rounded;
        }
    }

    /** The state of a lock that was acquired. */
    public enum State {
        /** It is held. */
        HELD,
        /** It is held, but was not renewed in time, or its maximum time to hold is almost over. */
        AT_RISK,
        /** It is lost: another client may hold it. */
        LOST,
        /** It was released. */
        RELEASED
    }

    /**
     * The position of a waiter.
     *
     * @param ahead how many claims are ahead in the queue
     * @param heldBy in words, the holders or the reason why the lock is unavailable. It is known when the wait begins,
     *     and for the first three waiters.
     * @param holders the holders; empty if {@code heldBy} is
     */
    public record Waiting(long ahead, Optional<String> heldBy, List<Holder> holders) {}

    /**
     * A holder of a lock.
     *
     * @param host its machine
     * @param pid its process
     * @param label its label; empty without one
     * @param token its fencing token
     * @param permits how many permits of a semaphore it has
     * @param since how long it has held the lock
     */
    public record Holder(String host, long pid, String label, long token, long permits, Duration since) {}

    /** A lock that was acquired, until it is released or lost. All methods can be called from any thread. */
    public static final class Held implements AutoCloseable {
        private final Keeper keeper;

        private Held(Keeper keeper) {
            this.keeper = keeper;
        }

        /**
         * Returns the name of the lock.
         *
         * @return the name, as it was passed to {@code acquire}
         */
        public String name() {
            return keeper.name;
        }

        /**
         * Returns the fencing token. Each holder gets a higher one. Send it with each write, to a resource that rejects
         * lower tokens than it has seen.
         *
         * @return the token
         */
        public long token() {
            return keeper.token;
        }

        /**
         * Returns the hold as a string, for {@code leasehold verify}.
         *
         * @return the sequencer
         */
        public String sequencer() {
            return keeper.sequencer;
        }

        /**
         * Returns the state, by the clock of this machine. Does not contact the service.
         *
         * @return the state
         */
        public State state() {
            return isLost() ? State.LOST : keeper.state;
        }

        /**
         * Returns whether the lock was lost. Reads the clock, so a lease that has ended is noticed immediately, even
         * after a pause of the whole process. Does not contact the service.
         *
         * @return whether it was lost
         */
        public boolean isLost() {
            return keeper.isLost();
        }

        /**
         * Throws an exception if the lock is no longer held. Does not contact the service.
         *
         * @throws LostException if it was lost
         * @throws IllegalStateException if it was closed
         */
        public void check() {
            if (isLost()) {
                throw keeper.loss();
            }
            if (keeper.isReleased) {
                throw new IllegalStateException(Json.quoted(keeper.name) + " was closed");
            }
        }

        /**
         * Returns why the lock was lost.
         *
         * @return the reason, or empty if it was not lost
         */
        public Optional<String> reason() {
            return isLost() ? Optional.of(keeper.lossReason()) : Optional.empty();
        }

        /**
         * Returns the time until which the lock is guaranteed, even if no further renewal succeeds.
         *
         * @return the time, by the wall clock as it is now; empty if there is no limit
         */
        public Optional<Instant> deadline() {
            long end = Math.min(keeper.deadline, keeper.ends);
            return end == FOREVER ? Optional.empty() : Optional.of(Instant.now().plusNanos(end - now()));
        }

        /**
         * Adds a callback for the loss of the lock. A thread of its own calls it, once, and immediately if the lock is
         * lost already. It is not called after {@link #close()}.
         *
         * @param callback what to do
         */
        public void onLost(Runnable callback) {
            keeper.onLost(Objects.requireNonNull(callback, "callback"));
        }

        /**
         * Releases the lock. Waits a few seconds for the service; after that, releasing continues in the background. A
         * second call has the same result. An interrupt does not end it.
         *
         * @throws LostException if the lock was lost before
         */
        @Override
        public void close() {
            keeper.release();
            keeper.awaitEnd();
            if (keeper.state == State.LOST) {
                throw keeper.loss();
            }
        }

        /** Returns the name, the token and the state. */
        @Override
        public String toString() {
            return "Held[" + Json.quoted(keeper.name) + ", token " + keeper.token + ", " + state() + "]";
        }
    }

    /** A lock was not acquired, or was lost. */
    public static class LeaseholdException extends RuntimeException {
        private static final long serialVersionUID = 1;

        /** The kind of the problem. */
        private final String kind;

        private LeaseholdException(String message, String kind) {
            super(message);
            this.kind = kind;
        }

        /**
         * Returns the kind of the problem, as in the answers of the service, such as {@code contended},
         * {@code unreachable} or {@code denied}.
         *
         * @return the kind
         */
        public String kind() {
            return kind;
        }
    }

    /** Another client held the lock during the whole wait, or an operator has frozen it. */
    public static final class NotAcquiredException extends LeaseholdException {
        private static final long serialVersionUID = 1;

        private NotAcquiredException(String message, String kind) {
            super(message, kind);
        }
    }

    /** The service is unreachable, cannot use its store, or rejects the token. */
    public static final class UnavailableException extends LeaseholdException {
        private static final long serialVersionUID = 1;

        private UnavailableException(String message, String kind) {
            super(message, kind);
        }
    }

    /** The lock was held and then lost. */
    public static final class LostException extends LeaseholdException {
        private static final long serialVersionUID = 1;

        private LostException(String message) {
            super(message, "lost");
        }
    }

    /** The service rejects the URL, the name of the lock or an option. */
    public static final class UsageException extends LeaseholdException {
        private static final long serialVersionUID = 1;

        private UsageException(String message, String kind) {
            super(message, kind);
        }
    }

    private static LeaseholdException error(String message, String kind) {
        if (NOT_ACQUIRED.contains(kind)) {
            return new NotAcquiredException(message, kind);
        }
        return USAGE.contains(kind) ? new UsageException(message, kind) : new UnavailableException(message, kind);
    }

    /** Nanoseconds since the start, on a clock that cannot be set. On Linux it counts a suspend of the machine, too. */
    private static long now() {
        long suspended = Clock.SUSPENDED.accumulateAndGet(Clock.suspended(), Math::max);
        return System.nanoTime() - Clock.START + suspended;
    }

    /** The time during which the machine was suspended, which `System.nanoTime` does not count. */
    private static final class Clock {
        private static final long START = System.nanoTime();
        private static final long AHEAD = ahead();
        private static final AtomicLong SUSPENDED = new AtomicLong();
        private static final long UNKNOWN = Long.MIN_VALUE / 2;
        // The resolution of the uptime.
        private static final long TICK = 10 * MILLISECOND;

        private static long suspended() {
            long more = AHEAD == UNKNOWN ? 0 : ahead() - AHEAD;
            return more > 2 * TICK ? more + TICK : 0;
        }

        /** How far the uptime is ahead of `System.nanoTime`. A pause between the two makes it smaller. */
        private static long ahead() {
            // Not by a channel, which an interrupt would close.
            try (var file = new FileInputStream("/proc/uptime")) {
                var bytes = new byte[64];
                int size = file.read(bytes);
                var text = new String(bytes, 0, Math.max(size, 0), StandardCharsets.US_ASCII);
                return (long) (Double.parseDouble(text.substring(0, text.indexOf(' '))) * SECOND) - System.nanoTime();
            } catch (IOException | RuntimeException error) {
                return UNKNOWN;
            }
        }
    }

    /** How long to wait before a call is repeated. Not at all at first: the connection was perhaps an old one. */
    private static long pauseAfter(long failures) {
        return failures <= 1 ? 0 : Math.min(PAUSE << Math.min(failures - 2, 10), LONGEST_PAUSE);
    }

    /** The reason of an error, without anything that was sent or received. */
    private static String why(Throwable error) {
        return error.getClass().getSimpleName();
    }

    private static byte[] read(String file, int limit) throws IOException {
        try (InputStream stream = new FileInputStream(file)) {
            return stream.readNBytes(limit);
        }
    }

    /** The time in the words of the command. */
    private static String shortly(long nanoseconds) {
        long seconds = nanoseconds / SECOND;
        if (seconds < 1) {
            return nanoseconds / MILLISECOND + "ms";
        }
        if (seconds < 60) {
            return seconds + "s";
        }
        if (seconds < 3600) {
            return seconds / 60 + "m " + seconds % 60 + "s";
        }
        return seconds / 3600 + "h " + seconds % 3600 / 60 + "m";
    }

    /** The text with every byte as `%XX` that is not a letter or digit, also the dots. */
    private static String escaped(String text) {
        var out = new StringBuilder();
        for (byte b : text.getBytes(StandardCharsets.UTF_8)) {
            if (b >= '0' && b <= '9' || b >= 'A' && b <= 'Z' || b >= 'a' && b <= 'z') {
                out.append((char) b);
            } else {
                out.append(String.format("%%%02X", b));
            }
        }
        return out.toString();
    }

    /** The parts of a URL. Errors show no part of it that may be a token. */
    private static final class Url {
        private static final Pattern HOST = Pattern.compile("(\\[[^\\]\\[%\\s]+\\]|[^\\]\\[%:\\s]+)(?::(\\d{1,5}))?");

        // Of a key store in memory.
        private static final char[] PASSWORD = "key".toCharArray();

        private final List<String> origins = new ArrayList<>();
        private final String base;
        private final String prefix;
        private final SSLContext tls;
        private final Map<String, String> parameters = new LinkedHashMap<>();

        private Url(String text) {
            var scheme = text.startsWith("https:") ? "https" : "http";
            if (text.startsWith("http+unix:")) {
                throw invalid("this client does not connect to Unix sockets"
                        + "\nhint: leasehold serve --listen 127.0.0.1:8484 --tokens FILE");
            }
            if (!text.startsWith(scheme + ":")) {
                throw invalid("this client connects to a lock service\nhint: http://host:8484/");
            }
            if (!text.startsWith(scheme + "://")) {
                throw invalid("missing \"//\" after the scheme");
            }
            var parts = split(text.substring(scheme.length() + 3), '?');
            var known = new LinkedHashSet<>(List.of("prefix", "token", "token_file"));
            if (scheme.equals("https")) {
                known.addAll(List.of("ca", "cert", "key"));
            }
            for (String pair : parts[1].isEmpty() ? new String[0] : parts[1].split("&", -1)) {
                var named = split(pair, '=');
                if (!known.contains(named[0])) {
                    // What has no name, or a strange one, may be a token.
                    boolean isName = named[0].matches("[a-z_]{1,19}") && pair.contains("=");
                    var shown = isName ? named[0] : "without a name";
                    throw invalid("unknown parameter " + shown + "; known: " + String.join(", ", known));
                }
                parameters.put(named[0], decoded(named[1]));
            }
            var place = split(parts[0], '/');
            if (place[0].contains("@")) {
                throw invalid("it cannot contain a user name or a password; use ?token_file=/path/to/file");
            }
            base = ("/" + place[1]).replaceAll("/+$", "");
            if (!base.matches("[A-Za-z0-9/._~-]*")) {
                throw invalid("its path contains characters that leasehold does not send");
            }
            for (String host : place[0].split(",", -1)) {
                origins.add(scheme + "://" + authority(host));
            }
            if (Set.copyOf(origins).size() < origins.size()) {
                throw invalid("it names a replica twice");
            }
            prefix = parameters.getOrDefault("prefix", "");
            try {
                checkToken(parameters.getOrDefault("token", ""));
            } catch (Rejected error) {
                throw new IllegalArgumentException(error.getMessage());
            }
            tls = scheme.equals("https") ? tls() : null;
        }

        private static IllegalArgumentException invalid(String what) {
            return new IllegalArgumentException("invalid store URL: " + what);
        }

        private static String[] split(String text, char by) {
            int at = text.indexOf(by);
            return at < 0 ? new String[] {text, ""} : new String[] {text.substring(0, at), text.substring(at + 1)};
        }

        /** The host and the port of one replica. */
        private static String authority(String text) {
            var match = HOST.matcher(text);
            int port = match.matches() && match.group(2) != null ? Integer.parseInt(match.group(2)) : PORT;
            if (!match.matches() || port < 1 || port > 65535) {
                throw invalid("use http://host1,host2:8484/");
            }
            var authority = match.group(1) + ":" + port;
            try {
                if (URI.create("http://" + authority).getHost() != null) {
                    return authority;
                }
            } catch (IllegalArgumentException error) {
                // As for a host that is missing.
            }
            throw invalid("a host name contains characters that Java rejects");
        }

        private static String decoded(String text) {
            var bytes = text.getBytes(StandardCharsets.UTF_8);
            var out = ByteBuffer.allocate(bytes.length);
            try {
                for (int i = 0; i < bytes.length; i++) {
                    if (bytes[i] != '%') {
                        out.put(bytes[i]);
                        continue;
                    }
                    int high = Character.digit(bytes[i + 1], 16);
                    int low = Character.digit(bytes[i + 2], 16);
                    if (high < 0 || low < 0) {
                        throw invalid("it contains an invalid escape");
                    }
                    out.put((byte) (high * 16 + low));
                    i += 2;
                }
                return StandardCharsets.UTF_8.newDecoder().decode(out.flip()).toString();
            } catch (ArrayIndexOutOfBoundsException | CharacterCodingException error) {
                throw invalid("it contains an invalid escape");
            }
        }

        private static String checkToken(String token) throws Rejected {
            if (token.matches("[!-~]*")) {
                return token;
            }
            throw new Rejected("config", "the token contains characters that a header cannot have");
        }

        /** The token as it is now; empty without one. */
        private String token() throws Rejected {
            var file = parameters.get("token_file");
            if (file == null) {
                return parameters.getOrDefault("token", "");
            }
            try {
                return checkToken(new String(read(file, 1 << 16), StandardCharsets.UTF_8).strip());
            } catch (IOException error) {
                var reason = new File(file).exists() ? why(error) : "no such file";
                throw new Rejected("denied", "cannot read token_file=" + file + ": " + reason);
            }
        }

        private SSLContext tls() {
            var ca = parameters.get("ca");
            var cert = parameters.get("cert");
            var key = parameters.get("key");
            if ((cert == null) != (key == null)) {
                throw invalid("cert= and key= need each other");
            }
            try {
                TrustManagerFactory trust = null;
                if (ca != null) {
                    var store = emptyStore();
                    int number = 0;
                    for (var authority : certificates("ca", ca)) {
                        store.setCertificateEntry("ca" + number++, authority);
                    }
                    trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
                    trust.init(store);
                }
                KeyManagerFactory own = null;
                if (cert != null) {
                    var store = emptyStore();
                    store.setKeyEntry("key", privateKey(key), PASSWORD, certificates("cert", cert));
                    own = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
                    own.init(store, PASSWORD);
                }
                var context = SSLContext.getInstance("TLS");
                context.init(
                        own == null ? null : own.getKeyManagers(), trust == null ? null : trust.getTrustManagers(), null);
                return context;
            } catch (IOException | GeneralSecurityException error) {
                throw invalid("cannot use its certificates: " + why(error));
            }
        }

        private static KeyStore emptyStore() throws IOException, GeneralSecurityException {
            var store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            return store;
        }

        private static Certificate[] certificates(String name, String file) {
            try (InputStream stream = new FileInputStream(file)) {
                var all = CertificateFactory.getInstance("X.509").generateCertificates(stream);
                if (!all.isEmpty()) {
                    return all.toArray(new Certificate[0]);
                }
                throw new IllegalArgumentException("cannot use " + name + "=" + file + ": it has no certificate");
            } catch (IOException | GeneralSecurityException error) {
                throw new IllegalArgumentException("cannot use " + name + "=" + file + ": " + why(error));
            }
        }

        private static PrivateKey privateKey(String file) throws GeneralSecurityException {
            try {
                var text = new String(read(file, 1 << 20), StandardCharsets.US_ASCII);
                var match = Pattern.compile("-----BEGIN PRIVATE KEY-----([^-]*)-----END").matcher(text);
                if (match.find()) {
                    var bytes = new PKCS8EncodedKeySpec(Base64.getMimeDecoder().decode(match.group(1)));
                    for (String algorithm : List.of("RSA", "EC", "EdDSA")) {
                        try {
                            return KeyFactory.getInstance(algorithm).generatePrivate(bytes);
                        } catch (InvalidKeySpecException error) {
                            // It is one of the others.
                        }
                    }
                }
            } catch (IOException | IllegalArgumentException error) {
                throw new IllegalArgumentException("cannot use key=" + file + ": " + why(error));
            }
            throw new IllegalArgumentException(
                    "cannot use key=" + file + ": it has no PKCS #8 key\nhint: openssl pkcs8 -topk8 -nodes");
        }
    }

    /** The client itself rejects the request. */
    private static final class Rejected extends Exception {
        private static final long serialVersionUID = 1;
        private final String kind;

        private Rejected(String kind, String message) {
            super(message);
            this.kind = kind;
        }
    }

    /**
     * An answer of the server, or with the status 0 the reason why there is none.
     *
     * @param sent a time before the request was sent
     * @param isUnsent whether the server has certainly not received the request
     */
    private record Answer(long sent, int status, Map<String, Object> fields, boolean isUnsent) {
        private static Answer none(String kind, String detail, boolean isUnsent) {
            return new Answer(0, 0, Map.of("kind", kind, "detail", detail), isUnsent);
        }

        /** `held`, `waiting`, `lost`, or nothing if the call did not succeed. */
        private String state() {
            var state = status >= 200 && status < 300 ? fields.get("status") : null;
            return state instanceof String text ? text : "";
        }

        private long number(String name) {
            return Leasehold.number(fields, name);
        }

        private String text(String name) {
            return Leasehold.text(fields, name);
        }

        /** How long the claim lasts; FOREVER if the store has no leases. */
        private long remaining() {
            return fields.get("remaining_ms") == null ? FOREVER : number("remaining_ms") * MILLISECOND;
        }

        /** Until when a grant is certain. Two clocks may run at different rates, so it is shortened by 1 % and 2 ms. */
        private long deadline() {
            long remaining = remaining();
            return remaining == FOREVER ? FOREVER : sent + remaining / 100 * 99 - 2 * MILLISECOND;
        }

        /** The error of an answer, or of a missing one. */
        private LeaseholdException problem() {
            String what = text("detail").isEmpty() ? text("title") : text("detail");
            String kind = text("kind");
            if (kind.isEmpty()) {
                // Not from the service: perhaps from a proxy.
                boolean isDenied = status == 401 || status == 403 || status == 407;
                boolean isBusy = status == 408 || status == 425 || status == 429 || status >= 500;
                kind = isBusy ? "unreachable" : isDenied ? "denied" : "config";
                what = "the server answered with the HTTP status " + status;
            }
            return error(what + " [" + kind + "]", kind);
        }
    }

    private static long number(Map<?, ?> fields, String name) {
        if (fields.get(name) instanceof Long number) {
            return number;
        }
        throw new IllegalArgumentException("the answer has no number " + name);
    }

    /** The text of a field; empty if it is missing. */
    private static String text(Map<?, ?> fields, String name) {
        return fields.get(name) instanceof String text ? text : "";
    }

    /** A claim that this client does not use. Without a release, the server may have it until {@code lives}. */
    private record AbandonedClaim(String id, long lives) {}

    /** Acquires, renews and releases a lock, on a thread of its own. */
    private static final class Keeper implements Runnable {
        private final Leasehold client;
        private final Url url;
        private final String name;
        private final Options options;
        private final long wait;
        private final long lease;
        private final long maxHold;
        // The longest wait for an answer.
        private final long limit;
        private final Map<String, Object> body = new LinkedHashMap<>();
        // A `Waiting`, the `Held`, or the exception for the caller of `acquire`.
        private final BlockingQueue<Object> news = new LinkedBlockingQueue<>();
        private final CountDownLatch ended = new CountDownLatch(1);
        // Wakes up the thread.
        private final Semaphore bell = new Semaphore(0);
        private final List<Runnable> callbacks = new ArrayList<>();

        // Whether the caller has released the lock, and whether this keeper leaves, perhaps for another reason.
        private volatile boolean isReleased;
        private volatile boolean isLeaving;
        // All threads read these. Only the thread of this keeper changes them.
        private volatile boolean isHeld;
        private volatile State state;
        private volatile String reason;
        // Until when the hold is certain, and when `maxHold` ends.
        private volatile long deadline = FOREVER;
        private volatile long ends = FOREVER;
        private volatile long token;
        private volatile String sequencer;

        // For the thread of this keeper.
        private String id;
        private long born;
        // Until when the server may have the claim without a further call.
        private long lives;
        // The claims of earlier IDs that the server may still have.
        private final Deque<AbandonedClaim> abandoned = new ArrayDeque<>();
        // From when the hold is at risk, and until when the lock stays unavailable after a release.
        private long risk = FOREVER;
        private long keepUntil;
        // The queue position, and how many claims the lock had then.
        private long place = -1;
        private long others = -1;
        // The replica in use, whether it was checked, and the store of the replicas.
        private int number;
        private boolean isChecked;
        private String identity;

        private Keeper(Leasehold client, String name, Options options, long wait) {
            this.client = client;
            this.url = client.url;
            this.name = name;
            this.options = options;
            this.wait = wait == FOREVER ? FOREVER : wait * MILLISECOND;
            lease = options.lease * MILLISECOND;
            maxHold = options.maxHold == FOREVER ? FOREVER : options.maxHold * MILLISECOND;
            limit = Math.max(Math.min(url.origins.size() > 1 ? ANSWER_OF_ONE : ANSWER, lease / 3), SHORTEST_ANSWER);
            body.put("name", url.prefix + name);
            body.put("lease_ms", options.lease);
            body.put("waiter_lease_ms", Math.min(options.lease, WAITER_LEASE));
            body.put("host", Machine.HOST);
            body.put("pid", Machine.PID);
            body.put("label", options.label);
            body.put("lock_delay_ms", options.lockDelay);
            if (options.kind != null) {
                boolean isSemaphore = options.kind.equals("semaphore");
                body.put("kind", isSemaphore ? "semaphore" : "rwlock");
                if (isSemaphore) {
                    body.put("capacity", options.capacity);
                }
                if (options.permits > 0) {
                    body.put("weight", options.permits);
                }
            }
            // Clients are spread over the replicas.
            number = RANDOM.nextInt(url.origins.size());
            isChecked = url.origins.size() == 1;
        }

        // For the threads of the caller.

        private void start() {
            thread("leasehold " + name, this).start();
        }

        /** Waits for the end of the wait, and calls `onWaiting` meanwhile. */
        private Held await() throws InterruptedException {
            while (true) {
                var next = news.take();
                if (next instanceof Held held) {
                    return held;
                }
                if (next instanceof RuntimeException error) {
                    // Of this thread.
                    error.fillInStackTrace();
                    throw error;
                }
                options.onWaiting.accept((Waiting) next);
            }
        }

        /** Releases the lock, or leaves the queue, in the background. */
        private void release() {
            isReleased = true;
            isLeaving = true;
            bell.release();
        }

        /** Waits for the end. An interrupt is kept for later. */
        private void awaitEnd() {
            boolean isInterrupted = false;
            while (true) {
                try {
                    ended.await();
                    break;
                } catch (InterruptedException error) {
                    isInterrupted = true;
                }
            }
            if (isInterrupted) {
                Thread.currentThread().interrupt();
            }
        }

        private boolean isLost() {
            return state == State.LOST || isOver();
        }

        /** Whether the hold has ended by the clock, perhaps before any thread has noticed. */
        private boolean isOver() {
            return isHeld && now() >= Math.min(deadline, ends);
        }

        private String lossReason() {
            var known = reason;
            return known != null ? known : now() >= ends ? MAX_HOLD : EXPIRED;
        }

        private LostException loss() {
            return new LostException("lost " + Json.quoted(name) + ": " + lossReason());
        }

        private void onLost(Runnable callback) {
            synchronized (callbacks) {
                if (state != State.LOST) {
                    callbacks.add(callback);
                    return;
                }
            }
            if (!isReleased) {
                thread("leasehold " + name + " lost", callback).start();
            }
        }

        private static Thread thread(String name, Runnable work) {
            var thread = new Thread(null, work, name, 0, false);
            thread.setDaemon(true);
            return thread;
        }

        // For the thread of this keeper.

        @Override
        public void run() {
            RuntimeException failure = null;
            try {
                failure = keep();
            } catch (Throwable error) {
                // Nothing that was received: it may be in the message.
                failure = error("the thread of the lock has failed: " + why(error), "failed");
                if (isHeld) {
                    // Before it is released.
                    lose(failure.getMessage());
                }
            }
            try {
                leave(failure);
            } catch (Throwable error) {
                failure = failure != null ? failure : error("releasing has failed: " + why(error), "failed");
            }
            report(failure);
            client.keepers.remove(this);
        }

        /** Holds the lock until it is released or lost, or returns why it was not acquired. */
        private RuntimeException keep() {
            newClaim();
            Answer grant;
            try {
                grant = isLeaving ? null : take();
            } catch (LeaseholdException error) {
                return error;
            }
            if (grant == null) {
                return new IllegalStateException("the client is closed");
            }
            hold(grant);
            if (state != State.LOST) {
                return null;
            }
            if (reason.equals(MAX_HOLD)) {
                // The holder may still work, so the lock stays unavailable for the lock delay.
                keepUntil = Math.max(keepUntil, now() + options.lockDelay * MILLISECOND);
            } else {
                // The lease ends what the server may have.
                lives = 0;
            }
            return null;
        }

        /** Stops using the claim. {@link #withdraw} releases it. */
        private void abandon() {
            if (lives > 0) {
                abandoned.add(new AbandonedClaim(id, lives));
            }
            lives = 0;
        }

        private void newClaim() {
            abandon();
            var bytes = new byte[16];
            RANDOM.nextBytes(bytes);
            id = HexFormat.of().formatHex(bytes);
            born = now();
        }

        /** Waits until then, or for an answer or a call of `release`. Meanwhile, reports what the clock changes. */
        private void sleep(long until) {
            watch();
            long end = until;
            if (isHeld) {
                end = Math.min(Math.min(end, deadline), Math.min(ends, state == State.AT_RISK ? FOREVER : risk));
            }
            // `Semaphore` does not count a suspend, so not longer than a second.
            long time = Math.min(Math.max(end - now(), MILLISECOND / 2), SECOND);
            try {
                if (bell.tryAcquire(time, TimeUnit.NANOSECONDS)) {
                    bell.drainPermits();
                }
            } catch (InterruptedException error) {
                // No code of this class interrupts it.
            }
            watch();
        }

        /** Sleeps until then, or until the lock is lost or to be released. */
        private void pause(long until) {
            while (!isLeaving && state != State.LOST && now() < until) {
                sleep(until);
            }
        }

        /** Reports what the clock changes. */
        private void watch() {
            if (!isHeld) {
                return;
            }
            long moment = now();
            if (isOver()) {
                lose(moment >= ends ? MAX_HOLD : EXPIRED);
            } else {
                state = moment >= risk ? State.AT_RISK : State.HELD;
            }
        }

        private void lose(String why) {
            List<Runnable> all;
            synchronized (callbacks) {
                reason = why;
                state = State.LOST;
                // After the state, so that no caller sees neither.
                isHeld = false;
                all = isReleased ? List.of() : List.copyOf(callbacks);
            }
            for (var callback : all) {
                thread("leasehold " + name + " lost", callback).start();
            }
        }

        /** Reports the end, once. */
        private void report(RuntimeException failure) {
            if (ended.getCount() == 0) {
                return;
            }
            if (state == null) {
                news.add(failure);
            } else if (state != State.LOST) {
                state = State.RELEASED;
            }
            ended.countDown();
        }

        /** Sends a request. With `givesWay`, a call of `release` ends it. */
        private Answer ask(String method, String path, Map<String, Object> fields, long limit, boolean givesWay) {
            long sent = now();
            var answer = send(method, path, fields, sent, sent + limit, givesWay);
            // A poll renews the claim, too.
            boolean isKept = path.startsWith("/v1/claims") && !method.equals("DELETE");
            boolean isRefused = answer.status >= 400 && answer.status < 500 && lives == 0;
            if (isKept && !answer.isUnsent && !isRefused) {
                lives = now() + lease;
            }
            return new Answer(sent, answer.status, answer.fields, answer.isUnsent);
        }

        private Answer send(
                String method, String path, Map<String, Object> fields, long sent, long until, boolean givesWay) {
            Answer answer;
            try {
                if (!isChecked) {
                    answer = check(until, givesWay);
                    if (answer != null) {
                        next();
                        return answer;
                    }
                }
                answer = exchange(method, path, fields, sent, until, givesWay);
            } catch (Rejected error) {
                return Answer.none(error.kind, error.getMessage(), true);
            }
            var kind = answer.text("kind");
            // Another replica may reach the store.
            if (answer.status == 0 || answer.status >= 500 && (kind.isEmpty() || TRANSIENT.contains(kind))) {
                next();
            }
            return answer;
        }

        private void next() {
            number = (number + 1) % url.origins.size();
            isChecked = url.origins.size() == 1;
        }

        /** Returns nothing if this replica has the store of the others, which otherwise would grant one lock twice. */
        private Answer check(long until, boolean givesWay) throws Rejected {
            var answer = exchange("GET", "/v1/store", null, now(), until, givesWay);
            if (answer.status == 0) {
                return Answer.none("unreachable", answer.text("detail"), true);
            }
            if (answer.status == 401 || answer.status == 403) {
                var detail = answer.text("detail");
                throw new Rejected("denied", detail.isEmpty() ? "the server rejected the token" : detail);
            }
            if (answer.status != 200) {
                return Answer.none("unreachable", "no answer from the server: HTTP status " + answer.status, true);
            }
            var store = answer.text("identity");
            if (identity == null) {
                identity = store;
            }
            if (!store.equals(identity)) {
                next();
                throw new Rejected("config", "the servers of the URL have different stores");
            }
            isChecked = true;
            return null;
        }

        private Answer exchange(
                String method, String path, Map<String, Object> fields, long sent, long until, boolean givesWay)
                throws Rejected {
            var token = url.token();
            var request = HttpRequest.newBuilder(URI.create(url.origins.get(number) + url.base + path));
            request.header("Accept", "application/json").header("Content-Type", "application/json");
            if (!token.isEmpty()) {
                request.header("Authorization", "Bearer " + token);
            }
            request.method(method, fields == null ? BodyPublishers.noBody() : BodyPublishers.ofString(Json.text(fields)));
            // Up to the head of the answer. It reports whether there was a connection.
            request.timeout(Duration.ofNanos(Math.max(until - now(), MILLISECOND)));
            var http = client.http();
            var call = http.sendAsync(request.build(), info -> new Body());
            call.whenComplete((response, error) -> bell.release());
            long end = until + SHORTEST_ANSWER;
            while (!call.isDone() && !(givesWay && isLeaving) && now() < end) {
                sleep(end);
            }
            if (now() >= until) {
                client.reconnect(http);
            }
            if (!call.isDone()) {
                // Its answer is dropped with its connection.
                call.cancel(true);
                return Answer.none("unreachable", "no answer from the server within " + shortly(until - sent), false);
            }
            return answer(call, until - sent);
        }

        private static Answer answer(CompletableFuture<HttpResponse<byte[]>> call, long limit) {
            HttpResponse<byte[]> response;
            try {
                response = call.join();
            } catch (CompletionException failed) {
                var error = failed.getCause();
                var within = "no answer from the server within " + shortly(limit);
                var detail = error instanceof HttpTimeoutException ? within : "no answer from the server: " + why(error);
                boolean isUnsent = error instanceof ConnectException || error instanceof HttpConnectTimeoutException;
                return Answer.none("unreachable", detail, isUnsent);
            }
            Map<String, Object> fields;
            try {
                fields = Json.read(response.body());
            } catch (IllegalArgumentException error) {
                if (response.statusCode() < 300) {
                    return Answer.none("unreachable", "no answer from the server: it is not JSON", false);
                }
                // A proxy wrote it, and its text is not shown.
                fields = Map.of();
            }
            return new Answer(0, response.statusCode(), fields, false);
        }

        /** The path of the claim, with the claim as the query. */
        private String path(String id, String name, Object value) {
            var query = new StringBuilder();
            var fields = new LinkedHashMap<>(body);
            fields.put(name, value);
            fields.forEach((key, field) -> {
                if (!field.equals("") && !field.equals(0L)) {
                    query.append(query.length() == 0 ? "?" : "&").append(key).append('=').append(escaped(field.toString()));
                }
            });
            return "/v1/claims/" + id + query;
        }

        /** Waits for the lock. Returns the grant. null: `release` was called. */
        private Answer take() {
            enum Step { JOIN, RENEW, POLL }
            long heard = now();
            long end = wait == FOREVER ? FOREVER : heard + wait;
            if (options.minHold > 0) {
                checkMinHold();
            }
            var step = Step.JOIN;
            long failures = 0;
            long early = 0;
            LeaseholdException error = null;
            while (true) {
                var answer = step == Step.JOIN ? join(end) : step == Step.RENEW ? renew() : poll(end);
                if (isLeaving) {
                    return null;
                }
                long moment = now();
                long pause = 0;
                var state = answer.state();
                if (Set.of("held", "waiting", "lost").contains(state)) {
                    heard = moment;
                    failures = 0;
                    error = null;
                }
                if (state.equals("held")) {
                    if (answer.deadline() - moment > lease / 3) {
                        return answer;
                    }
                    // Too little is left. A renewal never joins, so its answer says what became of the claim.
                    step = Step.RENEW;
                    pause = 10 * MILLISECOND;
                } else if (state.equals("waiting")) {
                    if (wait == 0) {
                        throw error(Json.quoted(name) + " is not free [contended]", "contended");
                    }
                    withdraw();
                    waits(answer, end);
                    // A server that shuts down answers early. It must not be polled in a tight loop.
                    boolean isEarly = step == Step.POLL && moment - answer.sent < pollTime(end) / 2;
                    early = isEarly ? early + 1 : 0;
                    step = Step.POLL;
                    pause = pauseAfter(early + 1);
                } else if (state.equals("lost")) {
                    newClaim();
                    step = Step.JOIN;
                    pause = 10 * MILLISECOND;
                } else {
                    failures++;
                    error = answer.problem();
                    if (answer.fields.get("retry_after_ms") != null) {
                        // A server that states when to retry is reachable.
                        heard = moment;
                    }
                    // A server that is full has answered, and the lock may be free.
                    boolean isFullAtEnd = error.kind().equals("full") && moment >= end;
                    boolean isFinal = wait == 0
                            ? failures > url.origins.size()
                            : isFullAtEnd || moment - heard > Math.max(PATIENCE, lease);
                    if (isFinal || !TRANSIENT.contains(error.kind())) {
                        throw error;
                    }
                    pause = pauseAfter(failures);
                    if (step == Step.JOIN && moment - born > waiterLease()) {
                        // A queue position may have expired unseen. One claim never gets two positions.
                        newClaim();
                    }
                }
                if (moment >= end && wait != 0) {
                    throw timeout(error);
                }
                pause(Math.min(moment + pause, end));
            }
        }

        private void checkMinHold() {
            var answer = ask("GET", "/v1/store", null, limit, false);
            boolean isSupported = answer.fields.get("guarantees") instanceof Map<?, ?> guarantees
                    && Boolean.TRUE.equals(guarantees.get("min_hold"));
            if (answer.status == 200 && !isSupported) {
                var what = "this store does not support minHold: it cannot keep a released lock unavailable";
                throw error(what, "unsupported");
            }
        }

        private Answer join(long end) {
            var fields = new LinkedHashMap<String, Object>();
            fields.put("id", id);
            fields.put("mode", wait == 0 ? "try" : "wait");
            fields.put("claim", body);
            long time = wait == 0 ? limit : Math.min(limit, Math.max(end - now(), SHORTEST_JOIN));
            return ask("POST", "/v1/claims", fields, time, false);
        }

        private Answer renew() {
            var fields = new LinkedHashMap<>(body);
            if (ends < FOREVER) {
                // The lease ends soon after `maxHold`, even if this process is paused.
                long left = Math.max(Math.max(ends, keepUntil) - now(), 0) / MILLISECOND;
                fields.put("lease_ms", Math.min((Long) body.get("lease_ms"), left + left / 50 + 5));
            }
            return ask("PUT", "/v1/claims/" + id, fields, limit, false);
        }

        private Answer poll(long end) {
            long time = pollTime(end);
            return ask("GET", path(id, "wait", time / MILLISECOND + "ms"), null, time + limit, true);
        }

        private long pollTime(long end) {
            // Short enough that the next replica is asked before the queue position expires.
            return Math.max(Math.min(waiterLease() / 3, end - now()), 0);
        }

        private long waiterLease() {
            return (Long) body.get("waiter_lease_ms") * MILLISECOND;
        }

        /** Reports the position if it has changed, and the holders to the first waiters. */
        private void waits(Answer answer, long end) {
            long ahead = answer.number("ahead");
            if (options.onWaiting == null || ahead == place) {
                return;
            }
            boolean isNear = others < 0 || answer.fields.get("head_remaining_ms") != null || ahead - others < NEAR;
            var lock = isNear ? lock(end) : Map.of();
            if (isLeaving) {
                return;
            }
            place = ahead;
            others = Math.max(claims(lock, "").size(), 1);
            var holders = new ArrayList<Holder>();
            for (var claim : claims(lock, "holding")) {
                var since = Duration.ofMillis(number(claim, "since_ms"));
                long permits = number(claim, "weight");
                holders.add(new Holder(text(claim, "host"), number(claim, "pid"), text(claim, "label"),
                        number(claim, "token"), permits, since));
            }
            news.add(new Waiting(ahead, Optional.ofNullable(heldBy(lock)), List.copyOf(holders)));
        }

        /** The lock with its holders, or nothing if the server does not answer soon. */
        private Map<?, ?> lock(long end) {
            long time = Math.max(Math.min(Math.min(SECOND, limit), end - now()), SHORTEST_ANSWER);
            var path = "/v1/locks/" + escaped(url.prefix + name) + "/holders";
            var answer = ask("GET", path, null, time, true);
            return answer.status == 200 && answer.fields.get("lock") instanceof Map<?, ?> lock ? lock : Map.of();
        }

        /** The error of a wait that has ended. {@code error} is that of the last request, or null if it succeeded. */
        private LeaseholdException timeout(LeaseholdException error) {
            var heldBy = heldBy(lock(FOREVER));
            if (error != null && heldBy == null) {
                return error;
            }
            var state = Json.quoted(name) + " is " + (heldBy == null ? "not free" : heldBy);
            return error("timed out after " + shortly(wait) + ": " + state, "timeout");
        }

        /** Renews the lock until it is lost or `release` is called. */
        private void hold(Answer grant) {
            long moment = now();
            if (maxHold != FOREVER) {
                ends = moment + maxHold;
            }
            if (options.minHold > 0) {
                keepUntil = moment + options.minHold * MILLISECOND;
            }
            token = grant.number("token");
            sequencer = sequencer(grant.text("sequencer"));
            long renewal = granted(grant);
            long failures = 0;
            state = State.HELD;
            isHeld = true;
            news.add(new Held(this));
            withdraw();
            while (true) {
                pause(renewal);
                watch();
                if (isLeaving || state == State.LOST) {
                    return;
                }
                var answer = renew();
                watch();
                if (state == State.LOST) {
                    // A loss is final, whatever the answer is.
                    return;
                }
                var now = answer.status == 200 ? answer.state() : "";
                if (now.equals("held") && answer.fields.get("token") instanceof Long same && same == token) {
                    renewal = granted(answer);
                    failures = 0;
                    watch();
                } else if (Set.of("held", "waiting", "lost").contains(now)) {
                    if (!now.equals("lost")) {
                        // A late copy of the join has made another claim with this ID.
                        abandon();
                    }
                    lose(GONE);
                } else {
                    // Whether the lease was renewed is unknown, so the deadline stays.
                    failures++;
                    renewal = now() + Math.min(pauseAfter(failures), lease / 10);
                }
            }
        }

        /** The sequencer as all clients of this URL write it. To them, a prefix is part of the store. */
        private String sequencer(String text) {
            var parts = text.split(":", -1);
            if (url.prefix.isEmpty() || parts.length != 5) {
                return text;
            }
            parts[3] += escaped("/" + url.prefix);
            parts[4] = escaped(name);
            return String.join(":", parts);
        }

        /** Notes until when a grant is certain. Returns when to renew it. */
        private long granted(Answer answer) {
            long remaining = answer.remaining();
            long time = remaining == FOREVER ? lease : remaining;
            deadline = isHeld ? Math.max(answer.deadline(), deadline) : answer.deadline();
            risk = remaining == FOREVER ? FOREVER : answer.sent + time / 3 * 2;
            if (ends < FOREVER) {
                risk = Math.min(risk, ends - Math.min(lease, maxHold) / 3);
            }
            return answer.sent + time / 3;
        }

        /**
         * Releases the claim and the abandoned ones, and then reports the end. Repeats the release until the lease is
         * over. If the server does not answer, the caller does not wait that long.
         */
        private void leave(RuntimeException failure) {
            isHeld = false;
            isLeaving = true;
            long began = now();
            long failures = 0;
            while (now() < lives || !abandoned.isEmpty()) {
                if (now() < lives) {
                    var answer = askToLeave(id, keepUntil);
                    if (answer.status == 200) {
                        lives = 0;
                        // If the call was repeated, an earlier copy may have released the lock.
                        boolean wasHeld = failure == null && state != State.LOST;
                        if (wasHeld && !Boolean.TRUE.equals(answer.fields.get("left")) && failures == 0) {
                            lose(GONE);
                        }
                    } else if (answer.status != 0 && answer.status != 401
                            && !TRANSIENT.contains(answer.problem().kind())) {
                        // The server has rejected the release, and not only the token, which may change. The
                        // caller does not wait for the next attempts.
                        report(failure);
                    }
                }
                withdraw();
                failures++;
                if (now() - began >= FAREWELL) {
                    report(failure);
                }
                long until = now() + pauseAfter(failures);
                while (now() < until) {
                    sleep(until);
                }
            }
        }

        /** Releases the abandoned claims, until a request fails. */
        private void withdraw() {
            while (!abandoned.isEmpty()) {
                var first = abandoned.element();
                if (now() < first.lives && askToLeave(first.id, 0).status != 200) {
                    return;
                }
                abandoned.remove();
            }
        }

        private Answer askToLeave(String id, long keepUntil) {
            long keep = Math.max(keepUntil - now(), 0) / MILLISECOND;
            return ask("DELETE", path(id, "keep_ms", keep), null, limit, false);
        }
    }

    /** The claims of a lock that have this standing, or all. */
    private static List<Map<?, ?>> claims(Map<?, ?> lock, String standing) {
        var all = new ArrayList<Map<?, ?>>();
        if (lock.get("claims") instanceof List<?> list) {
            for (var claim : list) {
                if (claim instanceof Map<?, ?> one && (standing.isEmpty() || standing.equals(one.get("standing")))) {
                    all.add(one);
                }
            }
        }
        return all;
    }

    /** Returns words that follow "is": the holder, or why the lock is unavailable. null if that is unknown. */
    private static String heldBy(Map<?, ?> lock) {
        var holders = claims(lock, "holding");
        if (!holders.isEmpty()) {
            var first = holders.get(0);
            var more = holders.size() > 1 ? ", and by " + (holders.size() - 1) + " more" : "";
            return "held by " + holder(first) + " for " + shortly(number(first, "since_ms") * MILLISECOND) + more;
        }
        for (var departed : claims(lock, "departed")) {
            boolean isEndless = departed.get("remaining_ms") == null;
            var left = isEndless ? "" : " for " + shortly(number(departed, "remaining_ms") * MILLISECOND) + " more";
            if (!(lock.get("frozen") instanceof String reason)) {
                return "in cooldown" + left + "; last held by " + holder(departed);
            }
            var why = reason.isEmpty() ? "" : ": " + printable(reason);
            return "frozen" + left + " by " + printable(text(departed, "host")) + why;
        }
        return null;
    }

    private static String holder(Map<?, ?> claim) {
        var label = text(claim, "label");
        var words = printable(text(claim, "host")) + " pid " + number(claim, "pid");
        return label.isEmpty() ? words : words + " (" + printable(label) + ")";
    }

    private static String printable(String text) {
        var unprintable = Pattern.compile("[\\p{C}\\p{Zl}\\p{Zp}]");
        return unprintable.matcher(text).replaceAll(at -> {
            return "\\\\u{" + Integer.toHexString(at.group().codePointAt(0)) + "}";
        });
    }

    /** What other clients see of this process. */
    private static final class Machine {
        private static final long PID = ProcessHandle.current().pid();
        private static final String HOST = host();

        private static String host() {
            try {
                return new String(read("/proc/sys/kernel/hostname", 256), StandardCharsets.UTF_8).strip();
            } catch (IOException error) {
                // Not on Linux.
            }
            try {
                return InetAddress.getLocalHost().getHostName();
            } catch (IOException error) {
                return "";
            }
        }
    }

    /** The bytes of an answer that is not too long. */
    private static final class Body implements BodySubscriber<byte[]> {
        private final CompletableFuture<byte[]> done = new CompletableFuture<>();
        private final ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        private Flow.Subscription subscription;

        @Override
        public CompletionStage<byte[]> getBody() {
            return done;
        }

        @Override
        public void onSubscribe(Flow.Subscription subscription) {
            this.subscription = subscription;
            subscription.request(Long.MAX_VALUE);
        }

        @Override
        public void onNext(List<ByteBuffer> parts) {
            for (var part : parts) {
                if (part.remaining() > LONGEST_ANSWER - bytes.size()) {
                    subscription.cancel();
                    done.completeExceptionally(new IOException("the answer is too long"));
                    return;
                }
                var copy = new byte[part.remaining()];
                part.get(copy);
                bytes.writeBytes(copy);
            }
        }

        @Override
        public void onError(Throwable error) {
            done.completeExceptionally(error);
        }

        @Override
        public void onComplete() {
            done.complete(bytes.toByteArray());
        }
    }

    /** A strict reader and a writer of JSON. Objects are maps, whole numbers are `Long`. */
    private static final class Json {
        private static final int DEEPEST = 64;
        private static final Pattern NUMBER = Pattern.compile("-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?");

        private final String text;
        private int at;

        private Json(String text) {
            this.text = text;
        }

        /** The fields of an object. */
        @SuppressWarnings("unchecked")
        private static Map<String, Object> read(byte[] bytes) {
            String text;
            try {
                text = StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes)).toString();
            } catch (CharacterCodingException error) {
                throw new IllegalArgumentException("not UTF-8");
            }
            var reader = new Json(text);
            var value = reader.value(0);
            if (reader.peek() != 0 || reader.at < text.length() || !(value instanceof Map)) {
                throw reader.invalid();
            }
            return (Map<String, Object>) value;
        }

        private IllegalArgumentException invalid() {
            return new IllegalArgumentException("not JSON at " + at);
        }

        /** The next character that is not a space; 0 at the end. */
        private char peek() {
            while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) {
                at++;
            }
            return at < text.length() ? text.charAt(at) : 0;
        }

        private boolean skips(char wanted) {
            boolean isNext = peek() == wanted;
            at += isNext ? 1 : 0;
            return isNext;
        }

        private void expect(char wanted) {
            if (!skips(wanted)) {
                throw invalid();
            }
        }

        private Object value(int depth) {
            if (depth > DEEPEST) {
                throw invalid();
            }
            return switch (peek()) {
                case '{' -> object(depth);
                case '[' -> array(depth);
                case '"' -> string();
                case 't' -> word("true", true);
                case 'f' -> word("false", false);
                case 'n' -> word("null", null);
                default -> number();
            };
        }

        private Map<String, Object> object(int depth) {
            var fields = new LinkedHashMap<String, Object>();
            expect('{');
            if (skips('}')) {
                return fields;
            }
            do {
                var name = peek() == '"' ? string() : null;
                expect(':');
                var value = value(depth + 1);
                if (name == null || fields.containsKey(name)) {
                    throw invalid();
                }
                fields.put(name, value);
            } while (skips(','));
            expect('}');
            return fields;
        }

        private List<Object> array(int depth) {
            var values = new ArrayList<>();
            expect('[');
            if (skips(']')) {
                return values;
            }
            do {
                values.add(value(depth + 1));
            } while (skips(','));
            expect(']');
            return values;
        }

        private Object word(String word, Object value) {
            if (!text.startsWith(word, at)) {
                throw invalid();
            }
            at += word.length();
            return value;
        }

        private Object number() {
            var match = NUMBER.matcher(text).region(at, text.length());
            if (!match.lookingAt()) {
                throw invalid();
            }
            at = match.end();
            // A whole number that is too large for a long is invalid.
            boolean isWhole = match.group(2) == null && match.group(3) == null;
            return isWhole ? (Object) Long.valueOf(match.group()) : (Object) Double.valueOf(match.group());
        }

        private String string() {
            var out = new StringBuilder();
            at++;
            while (true) {
                char next = character();
                if (next == '"') {
                    return out.toString();
                }
                if (next < ' ') {
                    throw invalid();
                }
                if (next != '\\') {
                    out.append(next);
                    continue;
                }
                char escape = character();
                int known = "\"\\/bfnrt".indexOf(escape);
                if (known >= 0) {
                    out.append("\"\\/\b\f\n\r\t".charAt(known));
                } else if (escape == 'u') {
                    int code = 0;
                    for (int i = 0; i < 4; i++) {
                        int digit = Character.digit(character(), 16);
                        if (digit < 0) {
                            throw invalid();
                        }
                        code = code * 16 + digit;
                    }
                    out.append((char) code);
                } else {
                    throw invalid();
                }
            }
        }

        private char character() {
            if (at >= text.length()) {
                throw invalid();
            }
            return text.charAt(at++);
        }

        private static String text(Object value) {
            if (value instanceof Map<?, ?> fields) {
                var parts = new ArrayList<String>();
                fields.forEach((name, field) -> parts.add(quoted(name.toString()) + ":" + text(field)));
                return "{" + String.join(",", parts) + "}";
            }
            return value instanceof String text ? quoted(text) : String.valueOf(value);
        }

        private static String quoted(String text) {
            var out = new StringBuilder("\"");
            for (char c : text.toCharArray()) {
                if (c == '"' || c == '\\') {
                    out.append('\\').append(c);
                } else if (c < ' ' || c == 0x7f || c == 0x2028 || c == 0x2029) {
                    out.append(String.format("\\u%04x", (int) c));
                } else {
                    out.append(c);
                }
            }
            return out.append('"').toString();
        }
    }
}
