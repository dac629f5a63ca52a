//! `leasehold schema`: prints the SQL that creates leasehold's tables, for databases whose schema
//! is managed by migrations.
//!
//! There are the tables of the store, and those that the library's `lock_in`, `once` and
//! `fence::sql` use in the caller's own transactions. It can also print the statements of these
//! functions, for programs that do not call the library. It does not connect to the database.

use std::io::{Write, stdout};
use std::process::ExitCode;

use crate::args::SchemaArgs;
use crate::exit::Failure;

pub(crate) fn main(args: &SchemaArgs) -> ExitCode {
    match printed(args.store.url(), args) {
        Ok(text) => {
            // A closed stdout is not a failure.
            let _ = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
            ExitCode::SUCCESS
        }
        Err(error) => Failure::from(error).report(),
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
fn printed(url: &str, args: &SchemaArgs) -> leasehold::Result<String> {
    use leasehold::database::{self, Dialect};
    use leasehold::{fence, lock_in, once, versioned};

    use crate::args::Tables;
    // This also rejects URLs of other stores.
    let locks = leasehold::store::sql::schema(&leasehold::store::kit::with_passwords(url)?)?;
    let dialect = match url.split_once(':').map_or(url, |(scheme, _)| scheme) {
        "sqlite" => Dialect::Sqlite,
        "mysql" | "mariadb" => Dialect::Mysql,
        _ => Dialect::Postgres,
    };
    if args.statements {
        let texts = [lock_in::text, once::text, versioned::text, fence::sql::text];
        return Ok(texts.map(|text| text(dialect)).join("\n"));
    }
    let transactions = database::schema(dialect);
    Ok(match args.tables {
        Tables::Locks => locks,
        Tables::Transactions => transactions,
        Tables::All => format!("{locks}\n{transactions}"),
    })
}

#[cfg(not(any(feature = "sqlite", feature = "postgres", feature = "mysql")))]
fn printed(url: &str, _: &SchemaArgs) -> leasehold::Result<String> {
    let scheme = url.split(':').next().filter(|scheme| ["postgres", "mysql"].contains(scheme));
    let hint = crate::missing::store_hint(scheme.unwrap_or("sqlite"));
    let what = "leasehold was built without SQL databases";
    Err(leasehold::Error::new(leasehold::ErrorKind::Unsupported, what).with_hint(hint))
}
