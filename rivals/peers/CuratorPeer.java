import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Collectors;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Curator's InterProcessMutex as a peer. Argument: a server's address. Each input line is one task. */
public class CuratorPeer {
    static final int CLIENTS = 8;

    static long turn(InterProcessMutex mutex) throws Exception {
        mutex.acquire();
        long note = System.nanoTime();
        mutex.release();
        return note;
    }

    static void pair(CuratorFramework client, double seconds) throws Exception {
        InterProcessMutex mutex = new InterProcessMutex(client, "/curator/pair");
        long started = System.nanoTime();
        long pairs = 0;
        do {
            turn(mutex);
            pairs++;
        } while (System.nanoTime() - started < seconds * 1e9);
        System.out.println((double) (System.nanoTime() - started) / pairs);
    }

    static void contend(List<CuratorFramework> clients, double seconds, int n) throws Exception {
        long until = System.nanoTime() + (long) (seconds * 1e9);
        List<List<Long>> all = new ArrayList<>();
        List<Thread> threads = new ArrayList<>();
        for (int i = 0; i < n; i++) {
            List<Long> mine = new ArrayList<>();
            all.add(mine);
            InterProcessMutex mutex =
                    new InterProcessMutex(clients.get(i % CLIENTS), "/curator/contention");
            threads.add(new Thread(() -> {
                try {
                    for (long note; (note = turn(mutex)) < until; ) mine.add(note);
                } catch (Exception e) {
                    throw new RuntimeException(e);
                }
            }));
        }
        for (Thread thread : threads) thread.start();
        for (Thread thread : threads) thread.join();
        for (List<Long> mine : all) {
            System.out.println(mine.stream().map(String::valueOf).collect(Collectors.joining(" ")));
        }
    }

    public static void main(String[] args) throws Exception {
        List<CuratorFramework> clients = new ArrayList<>();
        for (int i = 0; i < CLIENTS; i++) {
            CuratorFramework client =
                    CuratorFrameworkFactory.newClient(args[0], 10_000, 10_000, new RetryOneTime(100));
            client.start();
            clients.add(client);
        }
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            String[] work = line.split(" ");
            double seconds = Double.parseDouble(work[1]);
            if (work[0].equals("pair")) pair(clients.get(0), seconds);
            else contend(clients, seconds, Integer.parseInt(work[2]));
        }
        System.exit(0);
    }
}
