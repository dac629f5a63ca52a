//! Stored procedures for a plain turn (`plain.rs`). They make the same decisions with a third of
//! the work, because the server has parsed and planned them before.
//!
//! **How are they created?** By any client that connects and has the permission, as with the
//! tables, or by an administrator with the output of `leasehold schema`. If the procedures do not
//! exist and a client lacks the permission, it does a plain turn by a message of several
//! statements. All clients use one queue either way.
//!
//! **Which procedures are trusted?** A procedure runs with the permissions of its caller, and
//! another user may have created it. So a procedure is called only if its text is exactly ours. In
//! addition, only roles that could change the tables may be able to change it. A different text has
//! a different name, which contains a version. So a procedure never changes while clients call it.
//!
//! **What if a call fails?** Before its COMMIT nothing was done. After the COMMIT only the
//! notification of the next client remains. The session shows which of the two happened, because a
//! session variable names the claim that has left. PostgreSQL keeps the variable only if the
//! transaction was committed, and MySQL's procedure sets it after its COMMIT. A holder that gets an
//! error reads the variable. If the claim has not left, it leaves by a section (`join.rs`). So a
//! release that had no effect, because the lock was lost before, never reports success. A procedure
//! is not called again if it is gone, may no longer be called, or fails for another reason of its
//! own.

use super::fault::Failure;
use super::plain_words::HandedOver;
use super::procedure::{Procedure, Procedures};
use super::rows::{Cells, is_null};
use super::shared::Shared;
use super::wire::{Arg, Row, Statement, Wire};
use leasehold_core::Claim;

/// The result of a call.
#[derive(Debug)]
pub(super) enum Called {
    /// The procedure handled a simple case and returned this row.
    Done(Row),
    /// The case was not simple, and the procedure did nothing.
    Nothing,
    /// The procedure does not exist or must not be called.
    No,
    /// The procedure failed, possibly after everything was done.
    Unsure,
}

impl Shared {
    fn procedures(&self) -> Option<&Procedures> {
        self.sql.plain.as_ref()?.procedures.as_ref()
    }

    /// Returns whether hand-overs cost more work than necessary, because the procedures are
    /// missing.
    pub(super) fn lacks_procedures(&self) -> bool {
        self.procedures().is_some_and(|procedures| !procedures.are_ready())
    }

    /// Finds the procedures, or creates them if they do not exist and this user may create them. A
    /// database without procedures is not an error.
    pub(super) async fn prepare_procedures(
        &self,
        wire: &mut dyn Wire,
        may_create: bool,
    ) -> Result<(), Failure> {
        let Some(procedures) = self.procedures() else { return Ok(()) };
        let mut ready = true;
        for procedure in [&procedures.stand, &procedures.hand_over] {
            ready =
                ready && self.prepare_procedure(wire, procedures, procedure, may_create).await?;
        }
        procedures.set_ready(ready);
        Ok(())
    }

    async fn prepare_procedure(
        &self,
        wire: &mut dyn Wire,
        procedures: &Procedures,
        procedure: &Procedure,
        may_create: bool,
    ) -> Result<bool, Failure> {
        let Some(mut found) = text(wire, &procedure.find).await? else { return Ok(false) };
        if found.is_empty()
            && may_create
            && text(wire, &procedures.may_make).await?.is_some_and(|t| !t.is_empty())
        {
            match wire.raw(&procedure.create).await {
                // Another client may create the procedure at the same time.
                Ok(()) | Err(sqlx::Error::Database(_)) => {}
                Err(error) => return Err(error.into()),
            }
            found = text(wire, &procedure.find).await?.unwrap_or_default();
        }
        Ok(found == procedure.body)
    }

    /// Returns `Not` if the session's variable shows that a failed hand-over did not happen, and
    /// `Perhaps` otherwise. The variable is gone if the session is.
    pub(super) async fn has_handed_over(&self, wire: &mut dyn Wire, claim: &Claim) -> HandedOver {
        let Some(procedures) = self.procedures() else { return HandedOver::Perhaps };
        match text(wire, &procedures.left).await {
            Ok(Some(left)) if left == claim.id.to_hex() => HandedOver::Perhaps,
            Ok(Some(_)) => HandedOver::Not,
            Ok(None) | Err(_) => HandedOver::Perhaps,
        }
    }

    /// Calls a procedure.
    pub(super) async fn call_procedure(
        &self,
        wire: &mut dyn Wire,
        which: impl Fn(&Procedures) -> &Procedure,
        args: Vec<Arg>,
    ) -> Result<Called, Failure> {
        // Borrowed connections run everything in transactions, in which a procedure cannot commit.
        let may = !wire.is_borrowed();
        let ready = self.procedures().filter(|procedures| may && procedures.are_ready());
        let Some(procedures) = ready else { return Ok(Called::No) };
        match wire.rows(&which(procedures).call, args).await {
            Ok(mut rows) => Ok(match rows.pop() {
                Some(row) if !row.iter().all(is_null) => Called::Done(row),
                _ => Called::Nothing,
            }),
            Err(error) => match Failure::from(error) {
                // A limit of the server may have aborted the steps after the COMMIT.
                Failure::Conflict(_) => Ok(Called::Unsure),
                // A transient error such as a full disk is unrelated to the procedure.
                Failure::Final(error) if error.is_transient() => Err(error.into()),
                Failure::Final(_) => {
                    procedures.set_ready(false);
                    Ok(Called::Unsure)
                }
                failure => Err(failure),
            },
        }
    }
}

/// Returns the result of a statement with one column, as one text. Returns `None` if the database
/// does not support the statement.
async fn text(wire: &mut dyn Wire, statement: &Statement) -> Result<Option<String>, Failure> {
    match wire.rows(statement, Vec::new()).await.map_err(Failure::from) {
        Ok(rows) => {
            let all: Result<String, _> =
                rows.into_iter().map(|row| Cells::new(row).text()).collect();
            all.map(Some)
        }
        Err(Failure::Final(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

#[cfg(all(test, feature = "postgres", feature = "mysql"))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use sha2::{Digest, Sha256};

    use super::super::SqlStore;
    use super::super::procedure::VERSION;
    use leasehold_core::store::{Joined, Mode, Signal, Store};
    use leasehold_core::{Claim, Kind, Name};

    async fn open(url: &str) -> Arc<SqlStore> {
        SqlStore::open(url, &tokio::runtime::Handle::current()).await.unwrap()
    }

    async fn run(store: &SqlStore, sql: &str) {
        let mut pooled = store.shared.pool.take().await.unwrap();
        pooled.wire.raw(sql).await.unwrap();
        store.shared.pool.put(pooled);
    }

    /// Returns a claim that these tests do not renew. On a busy machine, a test may take longer than
    /// the default lease.
    fn claim() -> Claim {
        let mut claim = Claim::new(Name::new("turn").unwrap(), Kind::Mutex, 1, 1).unwrap();
        (claim.lease, claim.waiter_lease) = (Duration::from_secs(60), Duration::from_secs(60));
        claim
    }

    /// One client holds the lock, and another waits. When the holder releases the lock, the waiter
    /// acquires it and is notified.
    async fn hands_over(one: &SqlStore, other: &SqlStore) {
        let (first, next) = (claim(), claim());
        let holds = one.join(&first, Mode::Wait).await.unwrap();
        assert!(matches!(holds, Joined::Holding { .. }), "{holds:?}");
        let waits = other.join(&next, Mode::Wait).await.unwrap();
        assert!(matches!(waits, Joined::Waiting(_)), "{waits:?}");
        assert!(one.leave(&first, None).await.unwrap());
        // A client that starts to listen is asked to poll.
        while other.changed(&next).await.unwrap() == Signal::Ask {
            let asked = other.join(&next, Mode::Wait).await.unwrap();
            if matches!(asked, Joined::Holding { .. }) {
                break;
            }
        }
        assert!(other.leave(&next, None).await.unwrap());
    }

    /// Returns a database on each server of this run.
    fn databases() -> Vec<String> {
        let mysql = testbed::Server::MySql.in_this_run().then(|| testbed::mysql().database());
        let all = [testbed::postgres().database(), testbed::mariadb().database()];
        all.into_iter().chain(mysql).collect()
    }

    async fn drop_both(store: &SqlStore) {
        for name in ["stand", "hand_over"] {
            run(
                store,
                &format!("DROP PROCEDURE {}", store.parsed.table(&format!("{name}_{VERSION}"))),
            )
            .await;
        }
    }

    #[tokio::test]
    async fn clients_with_and_without_procedures_share_one_queue() {
        for url in databases() {
            are_in_one_queue(&url).await;
        }
    }

    async fn are_in_one_queue(url: &str) {
        let (one, other) = (open(url).await, open(url).await);
        for ready in [[true, true], [true, false], [false, true], [false, false]] {
            for (store, ready) in [&one, &other].into_iter().zip(ready) {
                store.shared.procedures().unwrap().set_ready(ready);
            }
            hands_over(&one, &other).await;
        }
    }

    #[tokio::test]
    async fn foreign_procedure_is_not_called() {
        let url = testbed::postgres().database();
        let store = open(&url).await;
        assert!(!store.shared.lacks_procedures());
        let ours = store.shared.procedures().unwrap().stand.create.clone();
        let theirs =
            ours.replace("IF head <> mine", "DELETE FROM public.leasehold_fence; IF head <> mine");
        assert_ne!(ours, theirs);
        run(&store, &theirs).await;
        let later = open(&url).await;
        assert!(later.shared.lacks_procedures());
        hands_over(&later, &later).await;
        // A procedure is not called either if its arguments are in another order or it has another
        // owner.
        run(&store, "DROP PROCEDURE public.leasehold_stand_2").await;
        run(&store, &ours.replace("lock_name text, mine text", "mine text, lock_name text")).await;
        assert!(
            open(&url).await.shared.lacks_procedures(),
            "a procedure with swapped arguments is called"
        );
        run(&store, "DROP PROCEDURE public.leasehold_stand_2").await;
        let database = url.rsplit('/').next().unwrap();
        let server = testbed::postgres();
        run(&store, &ours).await;
        server.admin(
            database,
            "CREATE ROLE mallory; ALTER PROCEDURE leasehold_stand_2 OWNER TO mallory",
        );
        assert!(
            open(&url).await.shared.lacks_procedures(),
            "a procedure of another owner is called"
        );
        server.admin(database, "ALTER PROCEDURE leasehold_stand_2 OWNER TO lh");
        assert!(!open(&url).await.shared.lacks_procedures());
        // A procedure is not called either if it would run with its creator's permissions or own
        // settings.
        for altered in ["SECURITY DEFINER", "SET work_mem = '1MB'"] {
            run(&store, "DROP PROCEDURE public.leasehold_stand_2").await;
            run(&store, &ours.replace("LANGUAGE plpgsql", &format!("LANGUAGE plpgsql {altered}")))
                .await;
            assert!(open(&url).await.shared.lacks_procedures(), "{altered}");
        }
        run(&store, "DROP PROCEDURE public.leasehold_stand_2").await;
        assert!(!open(&url).await.shared.lacks_procedures());
    }

    #[tokio::test]
    async fn missing_procedure_is_not_required() {
        for url in databases() {
            is_done_without(&url).await;
        }
    }

    async fn is_done_without(url: &str) {
        let (one, other) = (open(url).await, open(url).await);
        hands_over(&one, &other).await;
        drop_both(&one).await;
        hands_over(&one, &other).await;
        assert!(one.shared.lacks_procedures() && other.shared.lacks_procedures());
        // The next client that connects creates the procedures again.
        assert!(!open(url).await.shared.lacks_procedures());
    }

    #[tokio::test]
    async fn user_that_may_not_create_procedures_does_not_need_them() {
        let server = testbed::postgres();
        let url = server.database();
        let tables = open(&url).await;
        drop_both(&tables).await;
        let database = url.rsplit('/').next().unwrap();
        server.admin(
            database,
            "REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE plain LOGIN PASSWORD 'plain'; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO plain",
        );
        let plain = open(&url.replace("lh:lh@", "plain:plain@")).await;
        assert!(plain.shared.lacks_procedures());
        hands_over(&plain, &plain).await;
        // After another client has created the procedures, this user may call them.
        assert!(!open(&url).await.shared.lacks_procedures());
        let plain = open(&url.replace("lh:lh@", "plain:plain@")).await;
        assert!(!plain.shared.lacks_procedures());
        hands_over(&plain, &plain).await;
    }

    /// On MariaDB, only a procedure's creator can read its text. Another user cannot verify the
    /// procedure and therefore does not call it.
    #[tokio::test]
    async fn other_user_of_mariadb_calls_no_procedures() {
        let server = testbed::mariadb();
        let url = server.database();
        let ours = open(&url).await;
        let database = url.rsplit('/').next().unwrap();
        server.admin(&format!(
            "CREATE USER plain@'127.0.0.1' IDENTIFIED BY 'plain'; GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE \
             ON {database}.* TO plain@'127.0.0.1'"
        ));
        let plain = open(&url.replace("lh:lh@", "plain:plain@")).await;
        assert!(plain.shared.lacks_procedures() && !ours.shared.lacks_procedures());
        hands_over(&ours, &plain).await;
        hands_over(&plain, &ours).await;
    }

    /// The next client cannot be notified. The commit before the notification stays, and the
    /// release succeeds.
    #[tokio::test]
    async fn release_succeeds_even_if_its_notification_fails() {
        let url = testbed::postgres().database();
        let (one, other) = (open(&url).await, open(&url).await);
        let (first, next) = (claim(), claim());
        one.join(&first, Mode::Wait).await.unwrap();
        other.join(&next, Mode::Wait).await.unwrap();
        run(
            &one,
            "UPDATE public.leasehold_claims SET session = 'leasehold_hears_' || repeat('x', 200)",
        )
        .await;
        let mut pooled = one.shared.pool.take().await.unwrap();
        let wire = &mut *pooled.wire;
        let handed_over = one.shared.hand_over(wire, &first).await.unwrap();
        assert_eq!(handed_over, super::super::plain_words::HandedOver::Perhaps);
        let kept = one.shared.snapshot(wire, &first.name).await.unwrap().unwrap();
        assert_eq!(kept.queue.entries().map(|e| e.id).collect::<Vec<_>>(), [next.id]);
        one.shared.pool.put(pooled);
        // The same must hold for the store's public call.
        let again = claim();
        one.join(&again, Mode::Wait).await.unwrap();
        run(
            &one,
            "UPDATE public.leasehold_claims SET session = 'leasehold_hears_' || repeat('x', 200)",
        )
        .await;
        assert!(other.leave(&next, None).await.unwrap());
        assert!(one.leave(&again, None).await.unwrap());
    }

    /// Another transaction keeps the lock's row locked for too long. The hand-over has no effect
    /// and is not reported as done.
    #[tokio::test]
    async fn rolled_back_hand_over_is_not_reported_as_done() {
        use super::super::plain_words::HandedOver;
        use sqlx::Connection;
        let url = testbed::postgres().database();
        let store = open(&url).await;
        let (first, next) = (claim(), claim());
        store.join(&first, Mode::Wait).await.unwrap();
        store.join(&next, Mode::Wait).await.unwrap();
        let mut other = sqlx::PgConnection::connect(&url).await.unwrap();
        let lock = "BEGIN; SELECT 1 FROM leasehold_locks WHERE name = 'turn' FOR UPDATE";
        sqlx::raw_sql(lock).execute(&mut other).await.unwrap();
        let mut pooled = store.shared.pool.take().await.unwrap();
        let handed_over = store.shared.hand_over(&mut *pooled.wire, &first).await.unwrap();
        assert_eq!(handed_over, HandedOver::Not);
        sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
        let handed_over = store.shared.hand_over(&mut *pooled.wire, &first).await.unwrap();
        assert_eq!(handed_over, HandedOver::Done);
        assert!(!store.shared.lacks_procedures());
        store.shared.pool.put(pooled);
    }

    /// Connections borrowed from the caller's pool call no procedures. Our own connections still
    /// call them.
    #[tokio::test]
    async fn hand_over_on_a_borrowed_connection_reports_the_release() {
        use super::super::{callers::CallersPool, plain_words::HandedOver, url::SqlUrl};
        let url = testbed::postgres().database();
        let here = tokio::runtime::Handle::current();
        let pool = sqlx::PgPool::connect(&url).await.unwrap();
        let callers = Some(CallersPool::Postgres(pool, here.clone()));
        let parsed = SqlUrl { callers, ..SqlUrl::parse(&url).unwrap() };
        let store = SqlStore::open_parsed(parsed, url, &here).await.unwrap();
        let mut taken = Vec::new();
        while !taken
            .last()
            .is_some_and(|pooled: &super::super::pool::Pooled| pooled.wire.is_borrowed())
        {
            taken.push(store.shared.pool.take().await.unwrap());
        }
        let mut borrowed = taken.pop().unwrap();
        taken.into_iter().for_each(|pooled| store.shared.pool.put(pooled));
        let (first, next) = (claim(), claim());
        store.join(&first, Mode::Wait).await.unwrap();
        store.join(&next, Mode::Wait).await.unwrap();
        let wire = &mut *borrowed.wire;
        assert_eq!(store.shared.hand_over(wire, &first).await.unwrap(), HandedOver::Done);
        assert_eq!(store.shared.hand_over(wire, &first).await.unwrap(), HandedOver::Not);
        assert!(!store.shared.lacks_procedures());
        store.shared.pool.put(borrowed);
        assert!(store.leave(&next, None).await.unwrap());
        assert!(!store.leave(&next, None).await.unwrap());
    }

    /// If a text changed but its name did not, clients with the other text would no longer call the
    /// procedure.
    #[test]
    fn changed_procedure_text_requires_a_new_version() {
        let texts = [
            include_str!("procedures/postgres_stand.sql"),
            include_str!("procedures/postgres_hand_over.sql"),
            include_str!("procedures/mysql_stand.sql"),
            include_str!("procedures/mysql_hand_over.sql"),
        ];
        let sum: String =
            Sha256::digest(texts.concat()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            (VERSION, sum.get(..16).unwrap()),
            (2, "2d97d07263a29653"),
            "raise the version with the text"
        );
    }
}
