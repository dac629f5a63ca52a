//! Commands on a Redis server, as a client types them, and what it was answered.

use std::fmt;
use std::time::{Duration, Instant};

use redis::Value;
use redis::aio::MultiplexedConnection;

use crate::trouble::{Result, Trouble};

/// Only ever waited for when something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// One client's connection.
pub(crate) struct Wire(MultiplexedConnection);

/// A command and its answer.
pub(crate) struct Said {
    words: String,
    pub(crate) answer: String,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} → {}", self.words, self.answer)
    }
}

impl Wire {
    pub(crate) async fn open(port: u16) -> Result<Self> {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/"))?;
        // Only ever reached where the story says that no answer comes: then the connection is cut.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        Ok(Self(client.get_multiplexed_async_connection_with_config(&config).await?))
    }

    /// For what takes a connection of the driver's.
    pub(crate) fn driver(&mut self) -> &mut MultiplexedConnection {
        &mut self.0
    }

    /// One command.
    pub(crate) async fn say(&mut self, words: &[&str]) -> Result<Said> {
        self.call(words, words.join(" ")).await
    }

    /// A command that is told in these words.
    pub(crate) async fn call(&mut self, words: &[&str], told: String) -> Result<Said> {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(*word);
        });
        let value: Value = command.query_async(&mut self.0).await?;
        Ok(Said { words: told, answer: shown(&value) })
    }

    /// One command, of which only the answer is wanted.
    pub(crate) async fn ask(&mut self, words: &[&str]) -> Result<String> {
        Ok(self.say(words).await?.answer)
    }

    /// Says it again and again until this is the answer.
    pub(crate) async fn say_until(&mut self, words: &[&str], answer: &str) -> Result<Said> {
        let end = Instant::now() + PATIENCE;
        loop {
            let said = self.say(words).await?;
            if said.answer == answer {
                return Ok(said);
            }
            if Instant::now() > end {
                return Err(Trouble::new(format!("{said}, expected {answer}")));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Nil => "nil".into(),
        Value::Okay => "OK".into(),
        Value::Int(number) => number.to_string(),
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::ServerError(error) => error.to_string(),
        other => format!("{other:?}"),
    }
}
