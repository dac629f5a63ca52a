//! Sends commands to a Redis server, and keeps them with their replies as a client shows them.

use std::fmt;
use std::time::{Duration, Instant};

use redis::Value;
use redis::aio::MultiplexedConnection;

use crate::trouble::{Result, Trouble};

/// Time limit that is only reached if something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// One client's connection.
pub(crate) struct Wire(MultiplexedConnection);

/// A command and its reply.
pub(crate) struct Exchange {
    words: String,
    pub(crate) answer: String,
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} → {}", self.words, self.answer)
    }
}

impl Wire {
    pub(crate) async fn open(port: u16) -> Result<Self> {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/"))?;
        // This time limit matters only in stories in which no reply arrives, and those close the
        // connection.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        Ok(Self(client.get_multiplexed_async_connection_with_config(&config).await?))
    }

    /// Returns the driver's connection.
    pub(crate) fn driver(&mut self) -> &mut MultiplexedConnection {
        &mut self.0
    }

    /// Sends a command.
    pub(crate) async fn say(&mut self, words: &[&str]) -> Result<Exchange> {
        self.call(words, words.join(" ")).await
    }

    /// Sends a command that is shown as the text `shown_as`.
    pub(crate) async fn call(&mut self, words: &[&str], shown_as: String) -> Result<Exchange> {
        let mut command = redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(*word);
        });
        let value: Value = command.query_async(&mut self.0).await?;
        Ok(Exchange { words: shown_as, answer: shown(&value) })
    }

    /// Sends a command and returns only its reply.
    pub(crate) async fn ask(&mut self, words: &[&str]) -> Result<String> {
        Ok(self.say(words).await?.answer)
    }

    /// Repeats a command until it returns this reply.
    pub(crate) async fn say_until(&mut self, words: &[&str], answer: &str) -> Result<Exchange> {
        let end = Instant::now() + PATIENCE;
        loop {
            let reply = self.say(words).await?;
            if reply.answer == answer {
                return Ok(reply);
            }
            if Instant::now() > end {
                return Err(Trouble::new(format!("{reply}, expected {answer}")));
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
