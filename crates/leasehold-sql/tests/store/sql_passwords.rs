//! Passwords that change while a client runs.

use crate::sql_common::*;
use leasehold::ErrorKind;
use testbed::{MariaDb, Postgres, Setup};

without_mysql![changed_password_is_read_from_its_file];

trait Passwords {
    fn set_password(&self, url: &str, password: &str);
}

impl Passwords for Postgres {
    fn set_password(&self, url: &str, password: &str) {
        Server::admin(self, url, &format!("ALTER ROLE lh PASSWORD '{password}'"));
    }
}

impl Passwords for MariaDb {
    fn set_password(&self, url: &str, password: &str) {
        let alter = format!("ALTER USER 'lh'@'127.0.0.1' IDENTIFIED BY '{password}'");
        Server::admin(self, url, &alter);
    }
}

async fn changed_password_is_read_from_its_file<S: Server + Passwords>() {
    let server = S::with(Setup::new().fast());
    let database = server.database();
    let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&file, "lh\n").unwrap();
    let url = format!("{}?password_file={}", database.replace("lh:lh@", "lh@"), file.display());
    let [holder, waits] = [connect(&url).await, connect(&url).await];
    let guard = holder.mutex("job").lease(LONG).lock().await.unwrap();
    let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
    let mutex = waits.mutex("job").lease(LONG).on_waiting(move |_| {
        let _ = queued.send(());
    });
    let waiter = tokio::spawn(async move { mutex.lock().await });
    in_queue.recv().await.unwrap();

    server.set_password(&database, "changed");
    server.end_sessions();
    // The file has the old password, then none, then the new one.
    for old in ["lh", ""] {
        std::fs::write(&file, old).unwrap();
        // A session that is being ended may serve one more call.
        until("the login fails", async || {
            let Err(error) = holder.mutex("other").try_lock().await else { return false };
            assert_told(&error, ErrorKind::Unreachable, "changed");
            format!("{error:#}").contains("the file that password_file names")
        })
        .await;
    }
    std::fs::write(&file, "changed\n").unwrap();
    let back = async || holder.mutex("other").try_lock().await.is_ok();
    until("the holder logs in with the new password", back).await;
    assert!(guard.is_held());
    release(guard).await;
    release(tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap()).await;

    // A client that never logged in gets this error immediately.
    std::fs::write(&file, "wrong").unwrap();
    assert_told(&refusal(&url).await, ErrorKind::Denied, "wrong");
}
