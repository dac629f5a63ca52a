import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.RetryOneTime;

/** Curator as a contender. Arguments: HOSTS PATH, then count FILE ROUNDS | hold KIND | try KIND. */
public class CuratorPeer {
    public static void main(String[] args) throws Exception {
        String path = args[1];
        try (CuratorFramework client =
                CuratorFrameworkFactory.newClient(args[0], 10_000, 10_000, new RetryOneTime(100))) {
            client.start();
            switch (args[2]) {
                case "count": {
                    InterProcessLock lock = new InterProcessMutex(client, path);
                    Path file = Path.of(args[3]);
                    for (int i = Integer.parseInt(args[4]); i > 0; i--) {
                        lock.acquire();
                        int n = Integer.parseInt(Files.readString(file).trim());
                        Thread.sleep(2);
                        Files.writeString(file, String.valueOf(n + 1));
                        lock.release();
                    }
                    break;
                }
                case "hold": {
                    InterProcessLock lock = lock(client, path, args[3]);
                    lock.acquire();
                    System.out.println("held");
                    while (System.in.read() >= 0) {}
                    lock.release();
                    break;
                }
                case "try": {
                    InterProcessLock lock = lock(client, path, args[3]);
                    boolean held = lock.acquire(300, TimeUnit.MILLISECONDS);
                    System.out.println(held ? "yes" : "no");
                    if (held) lock.release();
                    break;
                }
                default:
                    throw new IllegalArgumentException(args[2]);
            }
        }
    }

    private static InterProcessLock lock(CuratorFramework client, String path, String kind) {
        InterProcessReadWriteLock both = new InterProcessReadWriteLock(client, path);
        return switch (kind) {
            case "mutex" -> new InterProcessMutex(client, path);
            case "read" -> both.readLock();
            case "write" -> both.writeLock();
            default -> throw new IllegalArgumentException(kind);
        };
    }
}
