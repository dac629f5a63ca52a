//! Runs the test cases of leasehold's own drivers on this driver.

#[path = "../../../crates/leasehold-driver-tests/tests/cases/mod.rs"]
#[macro_use]
mod cases;

use cases::*;
use diesel::result::Error as Failed;
use diesel_async::TransactionManager as _;
use diesel_async::{AnsiTransactionManager, AsyncConnection as _, AsyncPgConnection};
use diesel_transactions::Diesel;

const DIALECT: Dialect = Dialect::Postgres;

async fn bed() -> String {
    let url = testbed::postgres().database();
    let mut connection = AsyncPgConnection::establish(&url).await.unwrap();
    let mut session = Diesel(&mut connection);
    for sql in [database::schema(DIALECT).as_str()].into_iter().chain(CALLERS_TABLES) {
        session.batch(sql).await.unwrap();
    }
    url
}

async fn client(url: &str) -> AsyncPgConnection {
    AsyncPgConnection::establish(url).await.unwrap()
}

async fn begin(client: &mut AsyncPgConnection) -> Diesel<'_> {
    AnsiTransactionManager::begin_transaction(client).await.unwrap();
    Diesel(client)
}

async fn commit(tx: Diesel<'_>) -> Result<(), Failed> {
    AnsiTransactionManager::commit_transaction(tx.0).await
}

async fn rollback(tx: Diesel<'_>) {
    AnsiTransactionManager::rollback_transaction(tx.0).await.unwrap();
}

cases!();

#[tokio::test]
async fn lock_in_works_in_a_diesel_transaction_closure() {
    use diesel_transactions::Failed;
    let mut client = client(&bed().await).await;
    let counted = client
        .transaction(async |connection| {
            let mut tx = Diesel(connection);
            lock_in(&mut tx, "a").await?;
            tx.run("UPDATE t SET n = n + 1", &[]).await.map_err(Error::from)?;
            Ok::<_, Failed>(number(&mut tx, "SELECT n FROM t").await)
        })
        .await;
    assert_eq!(counted.unwrap(), 1);
}
