//! Opens the bucket of a URL with object_store.
//!
//! object_store finds the credentials in the environment, or gets them from the role of the machine
//! or its container. The URL takes precedence.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
#[cfg(feature = "gs")]
use object_store::StaticCredentialProvider;
#[cfg(feature = "s3")]
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum, S3ConditionalPut};
#[cfg(feature = "az")]
use object_store::azure::MicrosoftAzureBuilder;
#[cfg(feature = "gs")]
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder};
use object_store::{ObjectStore, RetryConfig};
use rustls::{ClientConfig, RootCertStore};

use super::dates::Dated;
use super::fault;
use super::url::{Cloud, ObjectsUrl};

/// Time after which an idle connection is closed, before a server does so.
const IDLE: Duration = Duration::from_secs(30);

/// The endpoint, account and key of the emulator, which are public.
#[cfg(feature = "az")]
const EMULATOR: (&str, &str, &str) = (
    "http://127.0.0.1:10000",
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
);

/// Opens the bucket without network I/O: only reads this machine's certificate authorities and
/// credentials. Adds an endpoint from the environment to `url`, so that the check of one endpoint
/// is not used for another.
pub(super) fn of(url: &mut ObjectsUrl) -> Result<Arc<dyn ObjectStore>> {
    if url.endpoint.is_none() {
        url.endpoint = in_environment(&url.cloud);
    }
    url.way = proxy(url.endpoint.as_deref(), |name| std::env::var(name).ok());
    let url = &*url;
    #[cfg(feature = "s3")]
    if matches!(url.cloud, Cloud::S3 { .. })
        && !url.is_anonymous
        && let Some(what) = not_found(|name| std::env::var(name).ok())
    {
        return Err(Error::new(ErrorKind::Config, format!("{}: {what}", url.place())));
    }
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
        Error::new(ErrorKind::Config, what).with_hint(hint).with_source(error)
    })
}

/// Returns the endpoint that the driver takes from the environment.
fn in_environment(cloud: &Cloud) -> Option<String> {
    match cloud {
        #[cfg(feature = "s3")]
        Cloud::S3 { .. } => {
            let builder = AmazonS3Builder::from_env();
            // If both settings exist, the first one wins.
            builder
                .get_config_value(&AmazonS3ConfigKey::S3Endpoint)
                .or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint))
        }
        #[cfg(feature = "gs")]
        Cloud::Gs => GoogleCloudStorageBuilder::from_env()
            .get_config_value(&object_store::gcp::GoogleConfigKey::BaseUrl),
        #[cfg(feature = "az")]
        Cloud::Az { is_emulator: true, .. } => None,
        #[cfg(feature = "az")]
        Cloud::Az { .. } => MicrosoftAzureBuilder::from_env()
            .get_config_value(&object_store::azure::AzureConfigKey::Endpoint),
    }
}

/// Returns the proxy that the environment sets for the endpoint, without its credentials.
fn proxy(endpoint: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let is_open = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    let names = if is_open { ["http_proxy", "HTTP_PROXY"] } else { ["https_proxy", "HTTPS_PROXY"] };
    let proxy = names.into_iter().chain(["all_proxy", "ALL_PROXY"]).find_map(variable)?;
    let proxy = proxy.rsplit_once('@').map_or(&*proxy, |(_, host)| host);
    (!proxy.is_empty()).then(|| proxy.to_owned())
}

/// Returns an error text if there are certainly no credentials for Amazon: a profile is set, which
/// the driver does not read, and none of the variables that the driver reads is set.
#[cfg(feature = "s3")]
fn not_found(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    const READ: [&str; 5] = [
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ];
    let profile = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"))?;
    let is_there = |name: &&str| variable(name).is_some_and(|value| !value.is_empty());
    if profile.is_empty() || READ.iter().any(is_there) {
        return None;
    }
    Some(format!(
        "no credentials for profile \"{}\": leasehold does not read AWS profiles and SSO. Export them: \
         eval \"$(aws configure export-credentials --format env)\"; for the role of this machine, unset AWS_PROFILE",
        fault::shown(&profile)
    ))
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
        // The URL's endpoint overrides an endpoint from the environment.
        builder = builder
            .with_config(AmazonS3ConfigKey::S3Endpoint, endpoint)
            .with_allow_http(endpoint.starts_with("http://"));
    }
    let is_amazon = url.endpoint.is_none();
    if is_amazon && builder.get_config_value(&AmazonS3ConfigKey::Checksum).is_none() {
        // Buckets with Object Lock require a checksum.
        builder = builder.with_checksum_algorithm(Checksum::SHA256);
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
        // Without credentials here, the driver would still query the machine's metadata service.
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
        Error::new(ErrorKind::Config, what).with_source(fault::shown(&why))
    };
    let builder = reqwest::Client::builder()
        // Each address of the host gets an equal share of this time, so that the last one is tried
        // as well.
        .connect_timeout(url.limit())
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

#[cfg(all(test, feature = "s3"))]
mod tests {
    use super::*;

    #[test]
    fn unread_profile_is_named_unless_other_credentials_exist() {
        let of = |set: &[(&str, &str)]| {
            let all: Vec<(String, String)> =
                set.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
            not_found(|name| {
                all.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone())
            })
        };
        let what = of(&[("AWS_PROFILE", "p")]).unwrap();
        assert!(what.contains("profile \"p\"") && what.contains("export-credentials"), "{what}");
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("AWS_PROFILE", "p"), ("AWS_ACCESS_KEY_ID", "a")]), None);
        assert_eq!(of(&[("AWS_PROFILE", "p"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "f")]), None);
    }

    #[test]
    fn proxy_of_an_endpoint_is_found_and_shows_no_secret() {
        let way = |endpoint: Option<&str>, name: &'static str, value: &'static str| {
            proxy(endpoint, |asked| (asked == name).then(|| value.to_owned()))
        };
        let secret = way(None, "HTTPS_PROXY", "http://u:sekret@proxy:3128");
        assert_eq!(secret.as_deref(), Some("proxy:3128"));
        assert_eq!(way(Some("http://h"), "https_proxy", "http://p"), None);
        assert_eq!(way(Some("http://h"), "http_proxy", "http://p").as_deref(), Some("http://p"));
        assert_eq!(way(Some("https://h"), "ALL_PROXY", "p:1").as_deref(), Some("p:1"));
    }
}
