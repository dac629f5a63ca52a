import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import com.sun.net.httpserver.HttpsConfigurator;
import com.sun.net.httpserver.HttpsParameters;
import com.sun.net.httpserver.HttpsServer;
import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.ProcessBuilder.Redirect;
import java.lang.ref.WeakReference;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Modifier;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.security.KeyStore;
import java.security.MessageDigest;
import java.time.Duration;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Comparator;
import java.util.Deque;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.regex.Pattern;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;
import leasehold.Leasehold;
import leasehold.Leasehold.Held;
import leasehold.Leasehold.LeaseholdException;
import leasehold.Leasehold.LostException;
import leasehold.Leasehold.NotAcquiredException;
import leasehold.Leasehold.Options;
import leasehold.Leasehold.State;
import leasehold.Leasehold.UnavailableException;
import leasehold.Leasehold.UsageException;
import leasehold.Leasehold.Waiting;

/**
 * Against a real {@code leasehold serve}. LEASEHOLD_COMMAND says where the command is.
 *
 * <p>Each method without parameters is a test, named after a row of the tables in clients/README.md. Arguments are the
 * names of the tests to run.
 */
public final class Tests {
    private static final String COMMAND = System.getenv().getOrDefault("LEASEHOLD_COMMAND", "leasehold");
    private static final int AT_ONCE = 4;
    private static final Set<Process> PROCESSES = ConcurrentHashMap.newKeySet();
    private static final HttpClient HTTP =
            HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).proxy(HttpClient.Builder.NO_PROXY).build();

    // What ends the test, the last first.
    private final Deque<AutoCloseable> after = new ArrayDeque<>();

    public static void main(String[] words) throws Exception {
        if (words.length > 0 && words[0].equals("--child")) {
            child(words[1], words[2], Duration.parse(words[3]));
            return;
        }
        Runtime.getRuntime().addShutdownHook(new Thread(() -> PROCESSES.forEach(Process::destroyForcibly)));
        var names = new ArrayList<String>();
        for (var method : Tests.class.getDeclaredMethods()) {
            int modifiers = method.getModifiers();
            boolean isTest = !Modifier.isStatic(modifiers) && !Modifier.isPrivate(modifiers) && !method.isSynthetic();
            if (isTest && (words.length == 0 || List.of(words).contains(method.getName()))) {
                names.add(method.getName());
            }
        }
        Collections.sort(names);
        var pool = Executors.newFixedThreadPool(AT_ONCE);
        var failures = new AtomicInteger();
        for (var name : names) {
            pool.execute(() -> {
                var output = new StringWriter();
                try {
                    run(name);
                    output.write("ok " + name);
                } catch (Throwable error) {
                    failures.incrementAndGet();
                    output.write("FAILED " + name + "\n");
                    error.printStackTrace(new PrintWriter(output, true));
                }
                System.out.println(output.toString().strip());
            });
        }
        pool.shutdown();
        pool.awaitTermination(1, TimeUnit.HOURS);
        boolean isFailure = failures.get() > 0 || names.isEmpty();
        System.out.println(names.size() - failures.get() + " passed, " + failures.get() + " failed");
        System.exit(isFailure ? 1 : 0);
    }

    private static void run(String name) throws Throwable {
        var test = new Tests();
        var done = background(() -> {
            Tests.class.getDeclaredMethod(name).invoke(test);
            return null;
        });
        try {
            done.get(5, TimeUnit.MINUTES);
        } catch (ExecutionException error) {
            throw error.getCause() instanceof InvocationTargetException failed ? failed.getCause() : error.getCause();
        } catch (TimeoutException error) {
            done.cancel(true);
            throw new AssertionError("the test did not end");
        } finally {
            while (!test.after.isEmpty()) {
                test.after.pop().close();
            }
        }
    }

    // Helpers.

    private interface Condition {
        boolean holds() throws Exception;
    }

    private interface Action {
        void run() throws Exception;
    }

    private static void check(boolean holds, Object what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    private static void equal(Object found, Object wanted) {
        check(found.equals(wanted), found + " instead of " + wanted);
    }

    private static void matches(String text, String pattern) {
        check(Pattern.compile(pattern).matcher(text).find(), text);
    }

    private static <E extends Throwable> E fails(Class<E> kind, Action action) {
        try {
            action.run();
        } catch (Throwable error) {
            if (kind == error.getClass()) {
                return kind.cast(error);
            }
            throw new AssertionError("another error", error);
        }
        throw new AssertionError("no error");
    }

    private static void eventually(Condition condition) throws Exception {
        var end = Instant.now().plusSeconds(120);
        while (!condition.holds()) {
            check(Instant.now().isBefore(end), "never");
            Thread.sleep(10);
        }
    }

    /** Runs this on another thread. */
    private static <T> FutureTask<T> background(Callable<T> work) {
        var task = new FutureTask<>(work);
        var thread = new Thread(task, "test");
        thread.setDaemon(true);
        thread.start();
        return task;
    }

    private static Options options() {
        return new Options();
    }

    private static Options lease(int milliseconds) {
        return options().lease(Duration.ofMillis(milliseconds));
    }

    private static Options wait(int milliseconds) {
        return options().wait(Duration.ofMillis(milliseconds));
    }

    private Path directory() throws IOException {
        var path = Files.createTempDirectory("leasehold-java-");
        after.push(() -> {
            try (var all = Files.walk(path)) {
                for (var one : all.sorted(Comparator.reverseOrder()).toList()) {
                    Files.deleteIfExists(one);
                }
            }
        });
        return path;
    }

    private Process start(Map<String, String> variables, String... words) throws IOException {
        var builder = new ProcessBuilder(words).redirectError(Redirect.INHERIT);
        builder.environment().putAll(variables);
        var process = builder.start();
        PROCESSES.add(process);
        after.push(() -> {
            process.destroyForcibly().waitFor();
            PROCESSES.remove(process);
        });
        return process;
    }

    private static BufferedReader lines(Process process) {
        return new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8));
    }

    /** The result of the command, with this store. */
    private int command(String store, String... words) throws Exception {
        var all = new ArrayList<>(List.of(COMMAND));
        all.addAll(List.of(words));
        var builder = new ProcessBuilder(all).redirectError(Redirect.INHERIT).redirectOutput(Redirect.DISCARD);
        builder.environment().put("LEASEHOLD_STORE", store);
        return builder.start().waitFor();
    }

    private static void kill(Process process, String signal) throws Exception {
        equal(new ProcessBuilder("kill", "-" + signal, "" + process.pid()).start().waitFor(), 0);
    }

    private record Server(Process process, String store) {}

    /** A server of this store. */
    private Server server(String store, String... words) throws IOException {
        var all = new ArrayList<>(List.of(COMMAND, "serve", "--store", store));
        all.addAll(List.of(words));
        var process = start(Map.of(), all.toArray(new String[0]));
        var line = lines(process).readLine();
        check(line != null, "the server did not start");
        return new Server(process, line.replace("listening on ", "") + "/");
    }

    /** A server of files. */
    private Server server() throws IOException {
        return server("file:" + directory() + "/store", "--listen", "127.0.0.1:0", "--no-auth");
    }

    private Leasehold client(String store) {
        var client = Leasehold.connect(store);
        // Not closed at the end: the server may be paused.
        return client;
    }

    /** How many claims the lock "x y" has. */
    private static int claims(String store) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(store + "v1/locks/x%20y/holders")).build();
        var answer = HTTP.send(request, BodyHandlers.ofString());
        equal(answer.statusCode(), 200);
        return answer.body().split("\"standing\"", -1).length - 1;
    }

    private record Reply(int status, String text) {}

    private interface Forward {
        Reply run() throws Exception;
    }

    private interface Rule {
        /** Returns the answer for the client, or null to close the connection. */
        Reply apply(String method, String body, Forward forward) throws Exception;
    }

    private static final Rule PASS = (method, body, forward) -> forward.run();
    private static final Rule DROP = (method, body, forward) -> null;

    /** Passes requests on to a server, according to a rule. */
    private final class Proxy {
        private final HttpServer listener;
        private final String target;
        private volatile Rule rule;

        private Proxy(String target, Rule rule, SSLContext tls) throws IOException {
            this.target = target;
            this.rule = rule;
            var address = new InetSocketAddress("127.0.0.1", 0);
            if (tls == null) {
                listener = HttpServer.create(address, 0);
            } else {
                var secure = HttpsServer.create(address, 0);
                secure.setHttpsConfigurator(new HttpsConfigurator(tls) {
                    @Override
                    public void configure(HttpsParameters parameters) {
                        var wanted = tls.getDefaultSSLParameters();
                        // The client has to show a certificate, too.
                        wanted.setNeedClientAuth(true);
                        parameters.setSSLParameters(wanted);
                    }
                });
                listener = secure;
            }
            var pool = Executors.newCachedThreadPool();
            listener.setExecutor(pool);
            listener.createContext("/", this::handle);
            listener.start();
            after.push(() -> {
                listener.stop(0);
                pool.shutdownNow();
            });
        }

        private String host() {
            return "127.0.0.1:" + listener.getAddress().getPort();
        }

        private String store() {
            return "http://" + host() + "/";
        }

        private void handle(HttpExchange exchange) throws IOException {
            try (exchange) {
                var body = exchange.getRequestBody().readAllBytes();
                var path = exchange.getRequestURI().toString().substring(1);
                var method = exchange.getRequestMethod();
                Forward forward = () -> {
                    var request = HttpRequest.newBuilder(URI.create(target + path));
                    request.header("Content-Type", "application/json");
                    request.method(method, BodyPublishers.ofByteArray(body));
                    var answer = HTTP.send(request.build(), BodyHandlers.ofString());
                    return new Reply(answer.statusCode(), answer.body());
                };
                Reply reply;
                try {
                    reply = rule.apply(method, new String(body, StandardCharsets.UTF_8), forward);
                } catch (Exception error) {
                    reply = null;
                }
                if (reply != null) {
                    var bytes = reply.text.getBytes(StandardCharsets.UTF_8);
                    exchange.sendResponseHeaders(reply.status, bytes.length == 0 ? -1 : bytes.length);
                    exchange.getResponseBody().write(bytes);
                }
            }
        }
    }

    private Proxy proxy(String target, Rule rule) throws IOException {
        return new Proxy(target, rule, null);
    }

    /** Waits until the lock was renewed a whole lease after now. */
    private static void outlives(Held held, int lease) throws Exception {
        var end = Instant.now().plusMillis(2L * lease);
        eventually(() -> {
            held.check();
            return held.deadline().get().isAfter(end);
        });
    }

    /** It has just been acquired, and no renewal succeeds: it is lost when its lease ends, by the clock. */
    private static void isLostInTime(Held held, int lease) throws Exception {
        var lost = new CountDownLatch(1);
        held.onLost(lost::countDown);
        var deadline = held.deadline().get();
        check(deadline.isBefore(Instant.now().plusMillis(lease * 99L / 100)), deadline);
        eventually(() -> {
            var now = Instant.now();
            boolean isLost = held.isLost();
            check(isLost || now.isBefore(deadline.plusMillis(20)), "held after its deadline");
            return isLost;
        });
        lost.await();
        check(!Instant.now().isBefore(deadline.minusMillis(20)), "lost before its deadline");
        equal(held.state(), State.LOST);
    }

    /** Another process that holds "x y" for this lease. */
    private Process child(String what, String store, int lease) throws IOException {
        var java = Path.of(System.getProperty("java.home"), "bin", "java").toString();
        var path = System.getProperty("java.class.path");
        var words = List.of(java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path, "Tests");
        var all = new ArrayList<>(words);
        all.addAll(List.of("--child", what, store, Duration.ofMillis(lease).toString()));
        return start(Map.of(), all.toArray(new String[0]));
    }

    private static void child(String what, String store, Duration lease) throws Exception {
        var held = Leasehold.connect(store).acquire("x y", options().lease(lease));
        switch (what) {
            case "holds" -> {
                System.out.println("held");
                System.in.read();
            }
            case "has-children" -> {
                System.out.println(new ProcessBuilder("sleep", "1000").start().pid());
                System.in.read();
            }
            case "waits-for-loss" -> {
                System.out.println("held");
                System.in.read();
                System.out.println(held.isLost() ? "lost" : "held");
                try {
                    held.close();
                } catch (LostException error) {
                    System.out.println("LostException");
                }
            }
            case "exits-in-release" -> {
                background(() -> {
                    held.close();
                    return null;
                });
                System.exit(0);
            }
            case "exits" -> System.exit(0);
            case "releases-at-exit" -> {
                Runtime.getRuntime().addShutdownHook(new Thread(held::close));
                System.exit(0);
            }
            case "releases-at-signal" -> {
                Runtime.getRuntime().addShutdownHook(new Thread(held::close));
                System.out.println("held");
                System.in.read();
            }
            default -> throw new AssertionError(what);
        }
    }

    // The behavior of all clients.

    void aLockIsHeldAndReleased() throws Exception {
        var store = server().store;
        var client = client(store);
        var first = client.acquire("x y", options().label("the first"));
        equal(first.state(), State.HELD);
        equal(first.name(), "x y");
        equal(command(store, "verify", first.sequencer()), 0);
        first.check();
        matches(fails(NotAcquiredException.class, () -> client.acquire("x y", wait(0))).getMessage(), "the first");
        check(client.tryAcquire("x y").isEmpty(), "acquired twice");
        first.close();
        first.close();
        equal(first.state(), State.RELEASED);
        fails(IllegalStateException.class, first::check);
        equal(claims(store), 0);
        try (var later = client.tryAcquire("x y").get()) {
            check(later.token() > first.token(), later);
        }
        // A client that is closed releases its locks, and ends its waits.
        var held = client.acquire("x y");
        var waiter = background(() -> client.acquire("x y"));
        eventually(() -> claims(store) == 2);
        client.close();
        equal(held.state(), State.RELEASED);
        equal(fails(ExecutionException.class, waiter::get).getCause().getClass(), IllegalStateException.class);
        equal(claims(store), 0);
        fails(IllegalStateException.class, () -> client.acquire("x y"));
    }

    void aWaiterSeesTheHolders() throws Exception {
        var client = client(server().store);
        var first = client.acquire("x", options().label("the first"));
        var seen = new ArrayList<Waiting>();
        var thread = Thread.currentThread();
        try (var second = client.acquire("x", options().onWaiting(waiting -> {
            check(Thread.currentThread() == thread, "another thread");
            seen.add(waiting);
            first.close();
        }))) {
            second.check();
        }
        var waiting = seen.get(0);
        equal(waiting.ahead(), 1L);
        matches(waiting.heldBy().get(), "\\(the first\\) for ");
        equal(waiting.holders().size(), 1);
        var holder = waiting.holders().get(0);
        equal(holder.label(), "the first");
        equal(holder.pid(), ProcessHandle.current().pid());
        equal(holder.token(), first.token());
    }

    void anErrorInTheBodyReleasesTheLock() throws Exception {
        var store = server().store;
        var client = client(store);
        var error = fails(IOException.class, () -> {
            try (var held = client.acquire("x y")) {
                held.check();
                throw new IOException("inside");
            }
        });
        equal(error.getMessage(), "inside");
        equal(claims(store), 0);
        // So does an error of the callback.
        try (var held = client.acquire("x y")) {
            var options = options().onWaiting(waiting -> {
                held.check();
                throw new ArithmeticException();
            });
            fails(ArithmeticException.class, () -> client.acquire("x y", options));
            eventually(() -> claims(store) == 1);
        }
    }

    void holdersTakeTurns() throws Exception {
        var client = client(server().store);
        var inside = new AtomicInteger();
        var turns = new ArrayList<Future<?>>();
        for (int i = 0; i < 10; i++) {
            turns.add(background(() -> {
                try (var held = client.acquire("x")) {
                    held.check();
                    equal(inside.incrementAndGet(), 1);
                    Thread.sleep(1);
                    inside.decrementAndGet();
                }
                return null;
            }));
        }
        for (var turn : turns) {
            turn.get();
        }
    }

    void aCancelledWaitLeavesTheQueue() throws Exception {
        var store = server().store;
        var client = client(store);
        var held = client.acquire("x y");
        var interrupted = new CountDownLatch(1);
        var waiter = new Thread(() -> {
            fails(InterruptedException.class, () -> client.acquire("x y"));
            interrupted.countDown();
        });
        waiter.setDaemon(true);
        waiter.start();
        eventually(() -> claims(store) == 2);
        waiter.interrupt();
        interrupted.await();
        eventually(() -> claims(store) == 1);
        held.check();
        held.close();
    }

    void aKilledCallerReleasesTheLock() throws Exception {
        var store = server().store;
        var child = child("holds", store, 5000);
        equal(lines(child).readLine(), "held");
        equal(claims(store), 1);
        child.destroyForcibly();
        client(store).acquire("x y").close();
    }

    void childrenOfAKilledCallerDoNotKeepTheLock() throws Exception {
        var store = server().store;
        var child = child("has-children", store, 5000);
        var grandchild = ProcessHandle.of(Long.parseLong(lines(child).readLine())).get();
        try {
            child.destroyForcibly();
            client(store).acquire("x y").close();
            check(grandchild.isAlive(), "it has ended");
        } finally {
            grandchild.destroyForcibly();
        }
    }

    void aChildProcessCannotReleaseTheLock() throws Exception {
        var store = server().store;
        var held = client(store).acquire("x y");
        for (var signal : List.of("TERM", "KILL")) {
            var child = start(Map.of(), "sleep", "1000");
            kill(child, signal);
            child.waitFor();
        }
        held.check();
        equal(claims(store), 1);
        held.close();
    }

    void anInterruptedAcquireLeavesNothingHeld() throws Exception {
        var store = server().store;
        var client = client(store);
        client.acquire("x y").close();
        for (int delay : List.of(0, 1, 2, 5, 10, 15, 20, 30, 50, 100)) {
            var isInterrupted = new AtomicInteger();
            var thread = new Thread(() -> {
                try (var held = client.acquire("x y")) {
                    held.check();
                } catch (InterruptedException error) {
                    isInterrupted.incrementAndGet();
                }
                isInterrupted.addAndGet(Thread.interrupted() ? 1 : 0);
            });
            thread.start();
            Thread.sleep(delay);
            thread.interrupt();
            thread.join();
            check(isInterrupted.get() <= 1, "two interrupts");
            eventually(() -> claims(store) == 0);
        }
        Thread.currentThread().interrupt();
        fails(InterruptedException.class, () -> client.acquire("x y"));
        equal(claims(store), 0);
    }

    void anInterruptedReleaseCanBeRepeated() throws Exception {
        var store = server().store;
        var held = client(store).acquire("x y");
        Thread.currentThread().interrupt();
        held.close();
        check(Thread.interrupted(), "the interrupt is missing");
        held.close();
        equal(held.state(), State.RELEASED);
        equal(claims(store), 0);
        // The process ends in the middle of it.
        equal(child("exits-in-release", store, 2000).waitFor(), 0);
        eventually(() -> claims(store) == 0);
    }

    void aLockCanBeReleasedAtExit() throws Exception {
        var store = server().store;
        // Much longer than the test.
        equal(child("releases-at-exit", store, 3_600_000).waitFor(), 0);
        equal(claims(store), 0);
        var child = child("releases-at-signal", store, 3_600_000);
        equal(lines(child).readLine(), "held");
        equal(claims(store), 1);
        child.destroy();
        child.waitFor();
        equal(claims(store), 0);
        equal(child("exits", store, 2000).waitFor(), 0);
        eventually(() -> claims(store) == 0);
    }

    void anUnreferencedLockStaysHeld() throws Exception {
        var direct = server().store;
        var renewals = new AtomicInteger();
        var store = proxy(direct, (method, body, forward) -> {
            renewals.addAndGet(method.equals("PUT") ? 1 : 0);
            return forward.run();
        }).store();
        client(store).acquire("x y", lease(5000));
        for (int i = 0; i < 3; i++) {
            var garbage = new WeakReference<>(new Object());
            int before = renewals.get();
            eventually(() -> {
                System.gc();
                return garbage.refersTo(null) && renewals.get() > before + 1;
            });
            equal(claims(direct), 1);
        }
    }

    void aCandidateTakesOverWhenTheLeaderIsGone() throws Exception {
        var store = server().store;
        var client = client(store);
        var led = Collections.synchronizedList(new ArrayList<String>());
        var tokens = Collections.synchronizedList(new ArrayList<Long>());
        var candidates = new LinkedHashMap<String, Thread>();
        for (var who : List.of("one", "two")) {
            var candidate = new Thread(() -> {
                fails(InterruptedException.class, () -> client.elect("x y", options(), term -> {
                    tokens.add(term.token());
                    led.add(who);
                    while (true) {
                        // Throws at the loss.
                        term.check();
                        Thread.sleep(10);
                    }
                }));
                led.add(who + " ended");
            });
            candidates.put(who, candidate);
            candidate.setDaemon(true);
            candidate.start();
            if (who.equals("one")) {
                eventually(() -> led.size() == 1);
            } else {
                eventually(() -> claims(store) == 2);
            }
        }
        equal(command(store, "evict", "x y"), 0);
        // Evicted, it rejoins the queue, behind the other.
        eventually(() -> led.size() == 2 && claims(store) == 2);
        equal(led, List.of("one", "two"));
        check(tokens.get(1) > tokens.get(0), tokens);
        for (var candidate : candidates.values()) {
            candidate.interrupt();
        }
        for (var candidate : candidates.values()) {
            candidate.join();
        }
        check(led.containsAll(List.of("one ended", "two ended")), led);
        eventually(() -> claims(store) == 0);
        // An error in the body ends the election, and the term.
        fails(IOException.class, () -> client.elect("x y", options(), term -> {
            throw new IOException("inside");
        }));
        equal(claims(store), 0);
    }

    void candidatesSurviveAnUnreachableStore() throws Exception {
        var requests = new AtomicInteger();
        var proxy = proxy(server().store, (method, body, forward) -> {
            requests.incrementAndGet();
            return null;
        });
        var term = background(() -> {
            fails(IOException.class, () -> client(proxy.store()).elect("x y", wait(0), held -> {
                throw new IOException("leads");
            }));
            return null;
        });
        // Several attempts, of two requests each.
        eventually(() -> requests.get() > 6);
        check(!term.isDone(), "the election has ended");
        proxy.rule = PASS;
        term.get();
    }

    void anElectionEndsForInvalidOptions() throws Exception {
        var client = client(server().store);
        fails(UsageException.class, () -> client.elect("x".repeat(999), options(), term -> {}));
        fails(UsageException.class, () -> client.elect("x", options().semaphore(2, 3), term -> {}));
    }

    void invalidOptionsAreRejected() throws Exception {
        var client = client(server().store);
        for (Action action : List.<Action>of(
                () -> options().read().write(),
                () -> options().write().semaphore(2),
                () -> options().semaphore(0),
                () -> options().semaphore(-1),
                () -> options().semaphore(2, 0),
                () -> options().label("\ud800"),
                () -> client.acquire("\ud800"))) {
            fails(IllegalArgumentException.class, action);
        }
        fails(UsageException.class, () -> client.acquire("x", options().semaphore(2, 3)));
        fails(UsageException.class, () -> client.acquire(""));
        fails(NullPointerException.class, () -> client.acquire(null));
        var error = fails(UnavailableException.class, () -> client("http://127.0.0.1:1/").tryAcquire("x"));
        equal(error.kind(), "unreachable");
    }

    void timesAreRoundedToMilliseconds() throws Exception {
        var bodies = Collections.synchronizedList(new ArrayList<String>());
        var direct = server().store;
        var client = client(proxy(direct, (method, body, forward) -> {
            bodies.add(body);
            return new Reply(409, "{\"kind\": \"contended\"}");
        }).store());
        var times = new LinkedHashMap<Duration, Integer>();
        times.put(Duration.ZERO, 0);
        times.put(Duration.ofNanos(1), 1);
        times.put(Duration.ofNanos(1_400_000), 1);
        times.put(Duration.ofNanos(1_500_000), 2);
        times.put(Duration.ofSeconds(10).dividedBy(3), 3333);
        for (var time : times.entrySet()) {
            bodies.clear();
            var options = options().lockDelay(time.getKey()).wait(time.getKey());
            fails(NotAcquiredException.class, () -> client.acquire("x", options));
            matches(bodies.get(0), "\"lock_delay_ms\":" + time.getValue() + "\\b");
            matches(bodies.get(0), time.getValue() == 0 ? "\"mode\":\"try\"" : "\"mode\":\"wait\"");
        }
        for (int lease : List.of(3333, 50, 86_400_000)) {
            bodies.clear();
            var options = options().lease(Duration.ofMillis(lease).plusNanos(lease == 3333 ? 333_333 : 0));
            fails(NotAcquiredException.class, () -> client.acquire("x", options));
            matches(bodies.get(0), "\"lease_ms\":" + lease + "\\b");
        }
        var shortest = Duration.ofNanos(1);
        try (var held = client(direct).acquire("x", options().minHold(shortest).wait(Duration.ofSeconds(50)))) {
            held.check();
            var error = fails(NotAcquiredException.class, () -> client(direct).acquire("x", options().wait(shortest)));
            matches(error.getMessage(), "timed out after 1ms");
        }
    }

    void infinityMeansNoLimit() throws Exception {
        var store = server().store;
        for (var endless : List.of(ChronoUnit.FOREVER.getDuration(), Duration.ofDays(36_501))) {
            try (var held = client(store).acquire("x y", options().wait(endless).maxHold(endless))) {
                held.check();
                equal(claims(store), 1);
            }
        }
    }

    void invalidTimesAreRejectedByName() {
        var setters = new LinkedHashMap<String, java.util.function.BiConsumer<Options, Duration>>();
        setters.put("wait", Options::wait);
        setters.put("lease", Options::lease);
        setters.put("maxHold", Options::maxHold);
        setters.put("minHold", Options::minHold);
        setters.put("lockDelay", Options::lockDelay);
        var endless = ChronoUnit.FOREVER.getDuration();
        setters.forEach((name, set) -> {
            var wrong = new ArrayList<>(List.of(Duration.ofNanos(-1), endless.negated()));
            if (name.equals("lease")) {
                wrong.addAll(List.of(Duration.ZERO, Duration.ofMillis(49), Duration.ofDays(2)));
            }
            if (List.of("lease", "minHold", "lockDelay").contains(name)) {
                wrong.add(endless);
            }
            for (var time : wrong) {
                var error = fails(IllegalArgumentException.class, () -> set.accept(options(), time));
                matches(error.getMessage(), "^" + name + " must be between .*, not " + time);
            }
            matches(fails(NullPointerException.class, () -> set.accept(options(), null)).getMessage(), name);
        });
        var error = fails(IllegalArgumentException.class, () -> options().maxHold(Duration.ZERO));
        matches(error.getMessage(), "^maxHold must be greater than zero");
    }

    void aLossDuringAPauseIsReportedAfterIt() throws Exception {
        var store = server().store;
        var child = child("waits-for-loss", store, 4000);
        var lines = lines(child);
        equal(lines.readLine(), "held");
        kill(child, "STOP");
        try (var held = client(store).acquire("x y")) {
            kill(child, "CONT");
            child.outputWriter().append('\n').flush();
            equal(lines.readLine(), "lost");
            equal(lines.readLine(), "LostException");
            held.check();
        }
    }

    void anEvictedLockIsLost() throws Exception {
        var store = server().store;
        var held = client(store).acquire("x y", lease(4000));
        check(held.deadline().get().isBefore(Instant.now().plusMillis(4000)), held.deadline());
        var lost = new CountDownLatch(1);
        held.onLost(lost::countDown);
        equal(command(store, "evict", "x y"), 0);
        lost.await();
        equal(held.state(), State.LOST);
        matches(held.reason().get(), "evicted");
        fails(LostException.class, held::check);
        fails(LostException.class, held::close);
        fails(LostException.class, held::close);
        // A body that fails has the loss as a suppressed exception.
        var error = fails(IOException.class, () -> {
            try (var again = client(store).acquire("x y", lease(4000))) {
                var isLost = new CountDownLatch(1);
                equal(command(store, "evict", "x y"), 0);
                again.onLost(isLost::countDown);
                isLost.await();
                // A callback that comes after the loss is called, too.
                var late = new CountDownLatch(1);
                again.onLost(late::countDown);
                late.await();
                throw new IOException("inside");
            }
        });
        equal(error.getSuppressed()[0].getClass(), LostException.class);
    }

    // Faults of the network and the server.

    void aLostReplyNeitherLosesNorLeavesALock() throws Exception {
        var direct = server().store;
        var counts = new ConcurrentHashMap<String, Integer>();
        var store = proxy(direct, (method, body, forward) -> {
            var reply = forward.run();
            // The first answer to each method, and then each second one.
            return counts.merge(method, 1, Integer::sum) % 2 == 1 ? null : reply;
        }).store();
        var client = client(store);
        var held = client.acquire("x y", lease(8000));
        equal(claims(direct), 1);
        outlives(held, 8000);
        held.close();
        equal(held.state(), State.RELEASED);
        equal(claims(direct), 0);
        try (var other = client(direct).acquire("x y")) {
            other.check();
            fails(NotAcquiredException.class, () -> client.acquire("x y", wait(0)));
        }
        check(counts.keySet().containsAll(List.of("POST", "PUT", "DELETE")), counts);
    }

    void aRepeatedRequestChangesNothing() throws Exception {
        var direct = server().store;
        var client = client(proxy(direct, (method, body, forward) -> {
            var reply = forward.run();
            forward.run();
            return reply;
        }).store());
        var held = client.acquire("x y", lease(8000));
        equal(claims(direct), 1);
        outlives(held, 8000);
        fails(NotAcquiredException.class, () -> client.acquire("x y", wait(300)));
        equal(claims(direct), 1);
        held.close();
        equal(held.state(), State.RELEASED);
        equal(claims(direct), 0);
    }

    /** A store that forwards each request, and adds the joins to the list. They can be sent again. */
    private String recordingJoins(String direct, List<Forward> joins) throws Exception {
        return proxy(direct, (method, body, forward) -> {
            if (method.equals("POST")) {
                joins.add(forward);
            }
            return forward.run();
        }).store();
    }

    void aLateRequestMakesNoSecondHolder() throws Exception {
        var direct = server().store;
        var joins = Collections.synchronizedList(new ArrayList<Forward>());
        var store = recordingJoins(direct, joins);
        var held = client(store).acquire("x y", lease(10_000));
        held.close();
        // The network delivers another copy of the join now.
        joins.get(0).run();
        equal(held.state(), State.RELEASED);
        equal(claims(direct), 1);
        // No client renews it.
        try (var later = client(direct).acquire("x y")) {
            check(later.token() > held.token(), later);
        }
    }

    void aLateReplyNeverExtendsAHold() throws Exception {
        var direct = server().store;
        var late = Collections.synchronizedList(new ArrayList<String>());
        var isOver = new CountDownLatch(1);
        var delivered = new CountDownLatch(2);
        var store = proxy(direct, (method, body, forward) -> {
            var reply = forward.run();
            // All answers to renewals, and the first to a join.
            if (method.equals("PUT") || method.equals("POST") && late.isEmpty()) {
                late.add(method);
                isOver.await();
                delivered.countDown();
            }
            return reply;
        }).store();
        // By a repeated join.
        var held = client(store).acquire("x y", lease(6000));
        isLostInTime(held, 6000);
        // The server has renewed it, so no other client can hold it yet.
        equal(claims(direct), 1);
        check(late.containsAll(List.of("POST", "PUT")), late);
        isOver.countDown();
        delivered.await();
        equal(held.state(), State.LOST);
        matches(fails(LostException.class, held::close).getMessage(), "expired");
        equal(held.state(), State.LOST);
    }

    void aWaitLongerThanALeaseLeavesNoClaim() throws Exception {
        var store = server().store;
        var client = client(store);
        var held = client.acquire("x y");
        var waiter = background(() -> {
            client.acquire("x y", lease(4000)).close();
            return null;
        });
        fails(NotAcquiredException.class, () -> client.acquire("x y", lease(4000).wait(Duration.ofSeconds(5))));
        equal(claims(store), 2);
        held.close();
        waiter.get();
        equal(claims(store), 0);
    }

    void anAbandonedClaimIsReleased() throws Exception {
        var direct = server().store;
        var held = client(direct).acquire("x y");
        var left = Collections.synchronizedList(new ArrayList<Integer>());
        var client = client(proxy(direct, (method, body, forward) -> {
            var reply = forward.run();
            if (method.equals("POST") && claims(direct) < 3) {
                // Drops the answers until the client joins with another ID.
                return null;
            }
            if (method.equals("DELETE")) {
                left.add(claims(direct));
            }
            return reply;
        }).store());
        fails(NotAcquiredException.class, () -> client.acquire("x y", lease(4000).wait(Duration.ofSeconds(10))));
        // The first release is that of the abandoned claim.
        equal(left, List.of(2, 1));
        held.close();
    }

    void aLateCopyOfAJoinIsReleased() throws Exception {
        var direct = server().store;
        var joins = Collections.synchronizedList(new ArrayList<Forward>());
        var store = recordingJoins(direct, joins);
        var held = client(store).acquire("x y");
        equal(command(direct, "evict", "x y"), 0);
        joins.get(0).run();
        equal(claims(direct), 1);
        // The next renewal finds another token.
        eventually(held::isLost);
        fails(LostException.class, held::close);
        equal(claims(direct), 0);
    }

    void anInvalidAnswerLeavesNoClaim() throws Exception {
        var direct = server().store;
        var held = client(direct).acquire("x y");
        var lock = "{\"claims\": [{\"standing\": \"holding\"}]}";
        var invalid = new Reply(200, "{\"status\": \"waiting\", \"lock\": " + lock + "}");
        Rule rule = (method, body, forward) -> method.equals("GET") ? invalid : forward.run();
        fails(UnavailableException.class, () -> client(proxy(direct, rule).store()).acquire("x y", wait(300)));
        equal(claims(direct), 1);
        // A call that does not wait must not poll.
        var waits = new Reply(202, "{\"status\": \"waiting\", \"ahead\": 1}");
        Rule joined = (method, body, forward) -> method.equals("POST") ? waits : forward.run();
        check(client(proxy(direct, joined).store()).tryAcquire("x y").isEmpty(), "acquired");
        held.close();
    }

    void aWaitThatEndsReportsTheLastError() throws Exception {
        var direct = server().store;
        var full = new Reply(429, "{\"kind\": \"full\", \"detail\": \"over quota\"}");
        equal(ends(direct, "POST", full).kind(), "full");
        equal(ends(direct, "POST", null).kind(), "unreachable");
        var held = client(direct).acquire("x y");
        equal(ends(direct, "POST", full).kind(), "full");
        equal(ends(direct, "GET", null).kind(), "unreachable");
        var timeout = ends(direct, "POST", null);
        equal(timeout.kind(), "timeout");
        matches(timeout.getMessage(), "held by");
        held.close();
    }

    /** The error of a wait during which requests with this method get this answer, or none. */
    private LeaseholdException ends(String direct, String method, Reply answer) throws Exception {
        Rule rule = (each, body, forward) -> each.equals(method) ? answer : forward.run();
        var client = client(proxy(direct, rule).store());
        try (var held = client.acquire("x y", wait(2000))) {
            throw new AssertionError(held);
        } catch (LeaseholdException error) {
            return error;
        }
    }

    void aWaitContinuesWhileTheServerIsFull() throws Exception {
        var full = new Reply(429, "{\"kind\": \"full\", \"detail\": \"over quota\", \"retry_after_ms\": 100}");
        // Longer than the outage of a server that a wait survives.
        long end = System.nanoTime() + Duration.ofSeconds(17).toNanos();
        Rule rule = (method, body, forward) -> System.nanoTime() < end ? full : forward.run();
        client(proxy(server().store, rule).store()).acquire("x y", wait(60_000)).close();
    }

    void aRequestLastsNoLongerThanTheWait() throws Exception {
        var over = new CountDownLatch(1);
        Rule rule = (method, body, forward) -> {
            over.await();
            return null;
        };
        var client = client(proxy(server().store, rule).store());
        var error = fails(UnavailableException.class, () -> client.acquire("x y", wait(1_900)));
        over.countDown();
        matches(error.getMessage(), "within 1s \\[unreachable\\]");
    }

    void aCallerDoesNotWaitForARejectedRelease() throws Exception {
        var denied = new Reply(403, "{\"kind\": \"denied\", \"detail\": \"no right to hold\"}");
        Rule rule = (method, body, forward) -> method.equals("DELETE") ? denied : forward.run();
        var held = client(proxy(server().store, rule).store()).acquire("x y");
        long began = System.nanoTime();
        held.close();
        check(System.nanoTime() - began < Duration.ofSeconds(5).toNanos(), "waited");
    }

    void aHoldSurvivesARestartOfTheServer() throws Exception {
        var path = "sqlite:" + directory() + "/locks.db";
        var first = server(path, "--listen", "127.0.0.1:0", "--no-auth");
        var store = first.store;
        var client = client(store);
        var held = client.acquire("x y", lease(10_000));
        var waiter = background(() -> {
            client.acquire("x y").close();
            return null;
        });
        eventually(() -> claims(store) == 2);
        first.process.destroyForcibly().waitFor();
        server(path, "--listen", URI.create(store).getAuthority(), "--no-auth");
        outlives(held, 10_000);
        equal(command(store, "verify", held.sequencer()), 0);
        held.close();
        equal(held.state(), State.RELEASED);
        waiter.get();
        equal(claims(store), 0);
    }

    void aPausedServerLosesTheLockBeforeItsLeaseEnds() throws Exception {
        var server = server();
        var client = client(server.store);
        var held = client.acquire("x y", lease(2000));
        kill(server.process, "STOP");
        isLostInTime(held, 2000);
        fails(LostException.class, held::check);
        fails(UnavailableException.class, () -> client.acquire("x y", lease(1000).wait(Duration.ZERO)));
        kill(server.process, "CONT");
        try (var later = client.acquire("x y")) {
            check(later.token() > held.token(), later);
        }
    }

    void aReleaseIsRepeatedUntilTheServerAnswers() throws Exception {
        var server = server();
        var rejected = new AtomicInteger();
        var store = proxy(server.store, (method, body, forward) -> {
            if (!method.equals("DELETE") || rejected.get() == 4) {
                return forward.run();
            }
            return rejected.incrementAndGet() % 2 == 1 ? new Reply(502, "<html>") : null;
        }).store();
        client(store).acquire("x y").close();
        equal(rejected.get(), 4);
        equal(claims(server.store), 0);
        // A caller does not wait for a server that is gone, for as long as the lease lasts.
        var held = client(server.store).acquire("x y", lease(3_600_000));
        server.process.destroyForcibly().waitFor();
        held.close();
        equal(held.state(), State.RELEASED);
    }

    /** The URL of a server that accepts these tokens. */
    private String withTokens(Path path, String... tokens) throws Exception {
        var hashes = new ArrayList<String>();
        for (var token : tokens) {
            var hash = MessageDigest.getInstance("SHA-256").digest(token.getBytes(StandardCharsets.UTF_8));
            hashes.add('"' + HexFormat.of().formatHex(hash) + '"');
        }
        var identity = "{\"identities\": [{\"name\": \"ci\", \"token_sha256\": [" + String.join(", ", hashes)
                + "], \"prefixes\": [\"ci/\"], \"rights\": [\"hold\", \"inspect\"]}]}";
        Files.writeString(path.resolve("tokens.json"), identity);
        return server("file:" + path + "/other", "--listen", "127.0.0.1:0", "--tokens", path + "/tokens.json").store;
    }

    void aRejectedTokenIsAnErrorWithoutTheToken() throws Exception {
        var address = withTokens(directory(), "accepted");
        for (var words : List.of("ci/x token=sekret", "ci/x ", "x token=accepted")) {
            var parts = words.split(" ", 2);
            var client = client(address + "?" + parts[1]);
            var error = fails(UnavailableException.class, () -> client.acquire(parts[0]));
            equal(error.kind(), "denied");
            var text = new StringWriter();
            error.printStackTrace(new PrintWriter(text, true));
            check(!Pattern.compile("sekret|accepted|[0-9a-f]{32}").matcher(text + "" + client).find(), text);
        }
        var store = address + "?prefix=ci/&token=accepted";
        try (var held = client(store).acquire("x")) {
            equal(held.name(), "x");
            equal(command(store, "verify", held.sequencer()), 0);
        }
    }

    private static void replace(Path file, String text) throws IOException {
        var next = Files.writeString(file.resolveSibling("new"), text + "\n");
        Files.move(next, file, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
    }

    void aTokenFileIsReadForEachRequest() throws Exception {
        var path = directory();
        var token = path.resolve("token");
        var client = client(withTokens(path, "first", "second") + "?token_file=" + token);
        var error = fails(UnavailableException.class, () -> client.acquire("ci/x"));
        matches(error.getMessage(), "cannot read token_file=.*no such file");
        replace(token, "first");
        try (var held = client.acquire("ci/x", lease(8000))) {
            replace(token, "second");
            outlives(held, 8000);
        }
        var held = client.acquire("ci/x", lease(4000));
        var lost = new CountDownLatch(1);
        held.onLost(lost::countDown);
        replace(token, "wrong");
        lost.await();
        matches(held.reason().get(), "expired");
    }

    void invalidUrlsAreRejectedWithoutTheirSecrets() {
        for (var url : List.of(
                "", "h", "http:", "http:h", "http://", "http://a,a", "http://a,", "http://h:0", "http://h:65536",
                "http://user:sekret@h/", "http://sekret@h/", "http://h/?tokn=sekret", "http://h/?sekret",
                "http://h/?token=sek%0aret", "http://h/?token=sekret%", "http://h/?token=%ffsekret",
                "http://h/?ca=/x", "http://h/a%20b", "http://h/a&token=sekret", "http://h_/", "http://[::1/",
                "http+unix:///a/socket", "redis://:sekret@h/", "https://h?cert=/x", "https://h?ca=/nowhere",
                "https://h?cert=/nowhere&key=/nowhere")) {
            var error = fails(IllegalArgumentException.class, () -> Leasehold.connect(url));
            var text = new StringWriter();
            error.printStackTrace(new PrintWriter(text, true));
            check(!text.toString().matches("(?s).*(sekret|sek.ret).*"), url);
        }
        for (var url : List.of("http://h", "http://a,b:1/base/?prefix=x", "https://[::1]:8484?token=x")) {
            Leasehold.connect(url).close();
        }
    }

    void theNextReplicaTakesOver() throws Exception {
        var direct = server().store;
        var proxies = List.of(proxy(direct, PASS), proxy(direct, PASS));
        var store = "http://127.0.0.1:1," + proxies.get(0).host() + "," + proxies.get(1).host();
        var held = client(store).acquire("x y", lease(8000));
        for (var one : proxies) {
            // One after the other answers nothing useful for longer than a lease.
            one.rule = DROP;
            outlives(held, 8000);
            one.rule = PASS;
        }
        held.close();
        equal(held.state(), State.RELEASED);
        equal(claims(direct), 0);
    }

    void replicasOfDifferentStoresAreRejected() throws Exception {
        var servers = List.of(server(), server());
        var proxies = new ArrayList<Proxy>();
        for (var server : servers) {
            proxies.add(proxy(server.store, PASS));
        }
        var client = client("http://" + proxies.get(0).host() + "," + proxies.get(1).host());
        Held held = null;
        while (held == null) {
            try {
                held = client.acquire("x y", lease(5000));
            } catch (LeaseholdException error) {
                // A replica that is slow is replaced, and the next one is rejected.
            }
        }
        var lost = new CountDownLatch(1);
        held.onLost(lost::countDown);
        // The one with which it began.
        int first = claims(servers.get(0).store) > 0 ? 0 : 1;
        equal(claims(servers.get(first).store), 1);
        proxies.get(first).rule = DROP;
        lost.await();
        equal(claims(servers.get(1 - first).store), 0);
    }

    void allKindsAndTimesOfLocks() throws Exception {
        var store = server().store;
        var client = client(store);
        var readers = List.of(client.acquire("x y", options().read()), client.acquire("x y", options().read()));
        check(client.tryAcquire("x y", options().write()).isEmpty(), "a writer among readers");
        readers.forEach(Held::close);
        var writer = client.acquire("x y", options().write());
        fails(NotAcquiredException.class, () -> client.acquire("x y", wait(100).read()));
        check(client.tryAcquire("x y", wait(100).read()).isEmpty(), "a reader beside a writer");
        writer.close();
        var permits = List.of(client.acquire("s", options().semaphore(3, 2)), client.acquire("s", options().semaphore(3)));
        check(client.tryAcquire("s", options().semaphore(3)).isEmpty(), "too many permits");
        permits.forEach(Held::close);
        fails(UsageException.class, () -> client.acquire("x y", options().semaphore(2, 3)));
        var held = client.acquire("x y", options().maxHold(Duration.ofMillis(500)));
        var lost = new CountDownLatch(1);
        held.onLost(lost::countDown);
        lost.await();
        matches(held.reason().get(), "maxHold");
        eventually(() -> claims(store) == 0);
        var began = Instant.now();
        client.acquire("x y", options().minHold(Duration.ofSeconds(5))).close();
        var error = fails(NotAcquiredException.class, () -> client.acquire("x y", wait(100)));
        matches(error.getMessage(), "in cooldown");
        try (var later = client.acquire("x y")) {
            check(Instant.now().isAfter(began.plusSeconds(5)), "too early");
            later.check();
        }
    }

    void aFrozenLockIsNotAcquired() throws Exception {
        var store = server().store;
        equal(command(store, "freeze", "x y", "--for", "1h", "--reason", "repairs"), 0);
        for (int wait : List.of(0, 200)) {
            var error = fails(NotAcquiredException.class, () -> client(store).acquire("x y", wait(wait)));
            matches(error.getMessage(), "repairs");
        }
        check(client(store).tryAcquire("x y").isEmpty(), "acquired");
    }

    void httpsNeedsTheRightCertificate() throws Exception {
        var path = directory();
        var pem = path + "/server.pem";
        var key = path + "/server.key";
        var store = path + "/server.p12";
        var words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1";
        var all = new ArrayList<>(Arrays.asList(words.split(" ")));
        all.addAll(List.of("-keyout", key, "-out", pem));
        equal(quietly(all), 0);
        equal(quietly(List.of("openssl", "pkcs12", "-export", "-passout", "pass:secret", "-in", pem, "-inkey", key,
                "-out", store)), 0);
        var keys = KeyStore.getInstance("PKCS12");
        try (var file = new FileInputStream(store)) {
            keys.load(file, "secret".toCharArray());
        }
        var own = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
        own.init(keys, "secret".toCharArray());
        keys.setCertificateEntry("client", keys.getCertificate(keys.aliases().nextElement()));
        var trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(keys);
        var tls = SSLContext.getInstance("TLS");
        tls.init(own.getKeyManagers(), trust.getTrustManagers(), null);
        var direct = server().store;
        var url = "https://" + new Proxy(direct, PASS, tls).host();
        var ours = "cert=" + pem + "&key=" + key;
        try (var held = client(url + "?ca=" + pem + "&" + ours).acquire("x y", lease(8000))) {
            outlives(held, 8000);
        }
        for (var query : List.of(ours, "ca=" + pem)) {
            fails(UnavailableException.class, () -> client(url + "?" + query).acquire("x y", wait(0)));
        }
        equal(claims(direct), 0);
        // Another host has the same certificate.
        var other = url.replace("127.0.0.1", "localhost") + "?ca=" + pem + "&" + ours;
        fails(UnavailableException.class, () -> client(other).acquire("x y", wait(0)));
    }

    private static int quietly(List<String> words) throws Exception {
        var builder = new ProcessBuilder(words).redirectOutput(Redirect.DISCARD).redirectError(Redirect.DISCARD);
        return builder.start().waitFor();
    }

    void aBusyProgramDoesNotHideALoss() throws Exception {
        var path = directory();
        var token = path.resolve("token");
        replace(token, "accepted");
        var held = client(withTokens(path, "accepted") + "?token_file=" + token).acquire("ci/x", lease(4000));
        // The thread of the lock is stuck at its next renewal: no other process opens this pipe.
        var pipe = token.resolveSibling("pipe");
        equal(quietly(List.of("mkfifo", pipe.toString())), 0);
        var link = Files.createLink(path.resolve("link"), pipe);
        Files.move(link, token, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
        var called = new CountDownLatch(1);
        held.onLost(called::countDown);
        eventually(held::isLost);
        equal(called.getCount(), 1L);
        equal(held.state(), State.LOST);
        matches(held.reason().get(), "expired");
        fails(LostException.class, held::check);
        // The thread continues, and reports the loss. Its next request reads a file again.
        replace(token, "accepted");
        try {
            Files.writeString(pipe, "accepted\n");
        } catch (IOException error) {
            // The thread has already closed the pipe.
        }
        called.await();
        fails(LostException.class, held::close);
    }
}
