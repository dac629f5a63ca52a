//! A plain turn (`plain.rs`) as procedures that the server keeps: what is decided is the same, and is decided by
//! a third of the work, since the server has read and planned it before.
//!
//! *Who makes them?* Whoever connects and may, as with the tables; or a person who runs what
//! `leasehold schema` prints. Who may not, where there are none, takes a plain turn by a message of many
//! statements, as without them: all are in one queue.
//!
//! *Whose are they?* A procedure runs with the rights of who calls it, so none is called but one whose text
//! is ours to the letter, and that nobody can change who could not change the tables: somebody else may have
//! made it. Another text has another name, which has a version, so that none is changed under those who call
//! it.
//!
//! *What if it fails?* Before its COMMIT nothing was done. Behind it nothing is done but telling the next one.
//! Which of both it was the session knows: a variable of it names the claim that has left, which PostgreSQL keeps
//! only if the transaction was committed, and MySQL's procedure sets behind its COMMIT. A holder that gets an error
//! asks for it, and leaves by a section (`join.rs`) if it has not left. So a release that had no effect, since the lock
//! was lost before, never says that it had one. One that is gone, may not be called any more, or fails for another reason of its own, is not called
//! again.

use super::fault::Failure;
use super::plain_words::HandedOver;
use super::procedure::{Procedure, Procedures};
use super::rows::{Cells, is_null};
use super::shared::Shared;
use super::wire::{Arg, Row, Statement, Wire};
use leasehold_core::Claim;

/// What came of a call.
#[derive(Debug)]
pub(super) enum Called {
    /// It is as simple as that: this is what it said.
    Done(Row),
    /// It is not, and nothing was done.
    Nothing,
    /// There is no such procedure.
    No,
    /// It failed in the end, perhaps when all was done.
    Unsure,
}

impl Shared {
    fn procedures(&self) -> Option<&Procedures> {
        self.sql.plain.as_ref()?.procedures.as_ref()
    }

    /// Whether a turn takes more work here than it would with procedures.
    pub(super) fn lacks_procedures(&self) -> bool {
        self.procedures().is_some_and(|procedures| !procedures.are_ready())
    }

    /// Finds them, or makes them if there are none and we may. What the database cannot do is no failure.
    pub(super) async fn prepare_procedures(&self, wire: &mut dyn Wire) -> Result<(), Failure> {
        let Some(procedures) = self.procedures() else { return Ok(()) };
        let mut ready = true;
        for procedure in [&procedures.stand, &procedures.hand_over] {
            ready = ready && self.prepare_procedure(wire, procedures, procedure).await?;
        }
        procedures.set_ready(ready);
        Ok(())
    }

    async fn prepare_procedure(
        &self,
        wire: &mut dyn Wire,
        procedures: &Procedures,
        procedure: &Procedure,
    ) -> Result<bool, Failure> {
        let Some(mut found) = text(wire, &procedure.find).await? else { return Ok(false) };
        if found.is_empty()
            && text(wire, &procedures.may_make).await?.is_some_and(|t| !t.is_empty())
        {
            match wire.raw(&procedure.create).await {
                // Or somebody else does so at this moment.
                Ok(()) | Err(sqlx::Error::Database(_)) => {}
                Err(error) => return Err(error.into()),
            }
            found = text(wire, &procedure.find).await?.unwrap_or_default();
        }
        Ok(found == procedure.body)
    }

    /// Whether a hand-over that failed was done nevertheless: by the session's own word, which is also gone if the
    /// session is.
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
        // What is borrowed is spoken to in transactions, in which a procedure cannot commit.
        let may = !wire.is_borrowed();
        let ready = self.procedures().filter(|procedures| may && procedures.are_ready());
        let Some(procedures) = ready else { return Ok(Called::No) };
        match wire.rows(&which(procedures).call, args).await {
            Ok(mut rows) => Ok(match rows.pop() {
                Some(row) if !row.iter().all(is_null) => Called::Done(row),
                _ => Called::Nothing,
            }),
            Err(error) => match Failure::from(error) {
                // A limit of the server's may have cut short what comes behind the COMMIT.
                Failure::Conflict(_) => Ok(Called::Unsure),
                // Full disks pass: what passes says nothing of the procedure.
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

/// What a statement of one column says, in one text; `None`: the database does not know the question.
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

    fn claim() -> Claim {
        Claim::new(Name::new("turn").unwrap(), Kind::Mutex, 1, 1).unwrap()
    }

    /// One holds, another waits, and is let in as the first one leaves, and told.
    async fn hands_over(one: &SqlStore, other: &SqlStore) {
        let (first, next) = (claim(), claim());
        let holds = one.join(&first, Mode::Wait).await.unwrap();
        assert!(matches!(holds, Joined::Holding { .. }), "{holds:?}");
        let waits = other.join(&next, Mode::Wait).await.unwrap();
        assert!(matches!(waits, Joined::Waiting(_)), "{waits:?}");
        assert!(one.leave(&first, None).await.unwrap());
        // As it begins to listen, it is told to ask.
        while other.changed(&next).await.unwrap() == Signal::Ask {
            let asked = other.join(&next, Mode::Wait).await.unwrap();
            if matches!(asked, Joined::Holding { .. }) {
                break;
            }
        }
        assert!(other.leave(&next, None).await.unwrap());
    }

    /// A database on each server of this run.
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
    async fn who_has_no_procedures_is_in_one_queue_with_who_has() {
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
    async fn a_procedure_that_somebody_else_made_is_not_called() {
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
        // Nor one that takes its arguments in another order, or belongs to somebody else.
        run(&store, "DROP PROCEDURE public.leasehold_stand_2").await;
        run(&store, &ours.replace("lock_name text, mine text", "mine text, lock_name text")).await;
        assert!(open(&url).await.shared.lacks_procedures(), "swapped");
        run(&store, "DROP PROCEDURE public.leasehold_stand_2").await;
        let database = url.rsplit('/').next().unwrap();
        let server = testbed::postgres();
        run(&store, &ours).await;
        server.admin(
            database,
            "CREATE ROLE mallory; ALTER PROCEDURE leasehold_stand_2 OWNER TO mallory",
        );
        assert!(open(&url).await.shared.lacks_procedures(), "another owner");
        server.admin(database, "ALTER PROCEDURE leasehold_stand_2 OWNER TO lh");
        assert!(!open(&url).await.shared.lacks_procedures());
        // Nor is one that would have the rights of who made it, or settings of its own.
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
    async fn a_procedure_that_is_gone_is_done_without() {
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
        // Who connects next makes them anew.
        assert!(!open(url).await.shared.lacks_procedures());
    }

    #[tokio::test]
    async fn who_may_not_make_them_does_without() {
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
        // Once somebody has made them, they may be called.
        assert!(!open(&url).await.shared.lacks_procedures());
        let plain = open(&url.replace("lh:lh@", "plain:plain@")).await;
        assert!(!plain.shared.lacks_procedures());
        hands_over(&plain, &plain).await;
    }

    /// Its text is seen by nobody but its maker there: then it is not called.
    #[tokio::test]
    async fn another_user_of_mariadb_does_without() {
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

    /// The next one cannot be told: what was committed before that stays, and is no error.
    #[tokio::test]
    async fn who_hands_over_and_cannot_tell_has_left() {
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
        // The same, as a call.
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

    /// Another transaction has the lock's row for longer than it is waited for: nothing was done, and it is known.
    #[tokio::test]
    async fn hand_over_that_was_undone_is_not_taken_for_done() {
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

    /// What is borrowed of the caller's pool calls none, and does not keep our own connection from it.
    #[tokio::test]
    async fn who_hands_over_by_what_he_borrowed_knows_that_he_has_left() {
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

    /// A text that is changed under its name would be called by nobody who has the other one.
    #[test]
    fn another_text_has_another_name() {
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
