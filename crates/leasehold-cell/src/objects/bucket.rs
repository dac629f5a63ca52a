//! The bucket of a URL, as object_store opens it.
//!
//! Credentials are found where object_store looks for them: in the environment, and in the role of the machine
//! or its container. What the URL says goes before.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
#[cfg(feature = "gs")]
use object_store::StaticCredentialProvider;
#[cfg(feature = "s3")]
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
#[cfg(feature = "az")]
use object_store::azure::MicrosoftAzureBuilder;
#[cfg(feature = "gs")]
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder};
use object_store::{ObjectStore, RetryConfig};
use rustls::{ClientConfig, RootCertStore};

use super::dates::Dated;
use super::fault;
use super::url::{Cloud, ObjectsUrl};

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(3);
/// What is not used for so long is closed; servers do so later.
const IDLE: Duration = Duration::from_secs(30);

/// The account of the emulator, and its key, which everybody knows.
#[cfg(feature = "az")]
const EMULATOR: (&str, &str, &str) = (
    "http://127.0.0.1:10000",
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
);

/// Opens it. No I/O but what is read of this machine's authorities and credentials.
pub(super) fn of(url: &ObjectsUrl) -> Result<Arc<dyn ObjectStore>> {
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let client = Dated(client(url)?);
    let built = match &url.cloud {
        #[cfg(feature = "s3")]
        Cloud::S3 { region } => s3(url, region.as_deref(), once, client),
        #[cfg(feature = "gs")]
        Cloud::Gs => gs(url, once, client),
        #[cfg(feature = "az")]
        Cloud::Az { account, is_emulator } => {
            az(url, account.as_deref(), *is_emulator, once, client)
        }
    };
    built.map_err(|error| {
        let what = format!("cannot open {}", url.place());
        let hint = format!(
            "check the URL, and the environment variables that begin with {}",
            url.cloud.variables()
        );
        let error = fault::shown(&error.to_string());
        Error::new(ErrorKind::Config, what).with_hint(hint).because(error)
    })
}

#[cfg(feature = "s3")]
fn s3(
    url: &ObjectsUrl,
    region: Option<&str>,
    once: RetryConfig,
    client: Dated,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&url.bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_retry(once)
        .with_http_connector(client);
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = &url.endpoint {
        // Of the two that there are, this one counts.
        builder = builder
            .with_config(AmazonS3ConfigKey::S3Endpoint, endpoint)
            .with_allow_http(endpoint.starts_with("http://"));
    }
    if url.is_anonymous {
        builder = builder.with_skip_signature(true);
    }
    Ok(Arc::new(builder.build()?))
}

#[cfg(feature = "gs")]
fn gs(
    url: &ObjectsUrl,
    once: RetryConfig,
    client: Dated,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&url.bucket)
        .with_retry(once)
        .with_http_connector(client);
    if let Some(endpoint) = &url.endpoint {
        builder = builder.with_base_url(endpoint);
    }
    if url.is_anonymous {
        // Told so, it would still ask the machine's metadata service who we are.
        let nobody = StaticCredentialProvider::new(GcpCredential { bearer: String::new() });
        builder = builder.with_skip_signature(true).with_credentials(Arc::new(nobody));
    }
    Ok(Arc::new(builder.build()?))
}

#[cfg(feature = "az")]
fn az(
    url: &ObjectsUrl,
    account: Option<&str>,
    is_emulator: bool,
    once: RetryConfig,
    client: Dated,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(&url.bucket)
        .with_retry(once)
        .with_http_connector(client);
    let mut endpoint = url.endpoint.clone();
    if is_emulator {
        let (at, account, key) = EMULATOR;
        let at = endpoint.as_deref().unwrap_or(at);
        builder = builder.with_account(account).with_access_key(key);
        endpoint = Some(format!("{at}/{account}"));
    }
    if let Some(account) = account {
        builder = builder.with_account(account);
    }
    if let Some(endpoint) = endpoint {
        let is_open = endpoint.starts_with("http://");
        builder = builder.with_endpoint(endpoint).with_allow_http(is_open);
    }
    if url.is_anonymous {
        builder = builder.with_skip_signature(true);
    }
    Ok(Arc::new(builder.build()?))
}

fn client(url: &ObjectsUrl) -> Result<reqwest::Client> {
    let broken = |why: String| {
        let what = format!("cannot set up connections to {}", url.place());
        Error::new(ErrorKind::Config, what).because(fault::shown(&why))
    };
    let builder = reqwest::Client::builder()
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE)
        .tcp_nodelay(true)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .user_agent("leasehold")
        .tls_backend_preconfigured(tls().map_err(|why| broken(why.to_string()))?);
    builder.build().map_err(|why| broken(why.to_string()))
}

fn tls() -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
